#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_ref(int64_t iterations) {
  constexpr int kChains = 8;
  float sums[kChains];
#pragma GCC unroll 8
  for (int c = 0; c < kChains; ++c) sums[c] = 0;
  const float factor = 0.5f;
  for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      sums[c] = sums[c] * factor + factor;
      __asm__ volatile("" : "+x"(sums[c]));  // one at a time, and none left out
    }
  return iterations * kChains * 2;
}

}  // namespace moechat
