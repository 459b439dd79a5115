#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_ref(int64_t iterations) {
  constexpr int kChains = 8;
  float sums[kChains] = {};
  const float factor = 0.5f;
  for (int64_t i = 0; i < iterations; ++i)
    for (float& sum : sums) {
      sum = sum * factor + factor;
      __asm__ volatile("" : "+x"(sum));  // one at a time, and none left out
    }
  return iterations * kChains * 2;
}

}  // namespace moechat
