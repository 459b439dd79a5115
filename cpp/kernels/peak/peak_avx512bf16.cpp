#include <immintrin.h>

#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_avx512bf16(int64_t iterations) {
  constexpr int kChains = 24;
  __m512 sums[kChains];
#pragma GCC unroll 24
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_setzero_ps();
  const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f00);  // 0.5
  for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm512_dpbf16_ps(sums[c], factor, factor);
      __asm__ volatile("" : "+v"(sums[c]));  // none left out
    }
  return iterations * kChains * 32 * 2;
}

}  // namespace moechat
