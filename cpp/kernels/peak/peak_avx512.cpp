#include <immintrin.h>

#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_avx512(int64_t iterations) {
  constexpr int kChains = 24;
  __m512 sums[kChains];
#pragma GCC unroll 24
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_setzero_ps();
  const __m512 factor = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm512_fmadd_ps(factor, factor, sums[c]);
      __asm__ volatile("" : "+v"(sums[c]));  // none left out
    }
  return iterations * kChains * 16 * 2;
}

}  // namespace moechat
