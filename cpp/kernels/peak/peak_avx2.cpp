#include <immintrin.h>

#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_avx2(int64_t iterations) {
  constexpr int kChains = 12;
  __m256 sums[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) sums[c] = _mm256_setzero_ps();
  const __m256 factor = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm256_fmadd_ps(factor, factor, sums[c]);
      __asm__ volatile("" : "+x"(sums[c]));  // none left out
    }
  return iterations * kChains * 8 * 2;
}

}  // namespace moechat
