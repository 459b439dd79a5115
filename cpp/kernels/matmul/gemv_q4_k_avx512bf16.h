// gemv of GGUF's kQ4_K with vdpbf16ps. Only for files of that suffix.
//
//   y = sum over sub-blocks of 32:  d * scale * (codes . x)  -  dmin * minimum * (sum of x)
//
// 64 bytes hold four sub-blocks: the low nibbles of the first and second half, and the high ones.
// They are looked up as other nibbles are (nibbles_avx512bf16.h); the low ones of a step are summed
// in one register, the high ones in another, eight lanes a sub-block. The sums of x over the
// sub-blocks stand beside it, so that all minima of a block cost one multiplication.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/number_formats.h"
#include "kernels/matmul/gemv_nibbles_avx512bf16.h"
#include "kernels/matmul/k_codes.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/nibbles_avx512bf16.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int64_t kQ4KBytes = 144;  // a block of 256 columns
constexpr int64_t kQ4KInputs = 256 + 32;  // of a row of x: two steps, then 16 floats

inline constexpr uint16_t kUnsignedValues[16] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

struct NibblesQ4K {
  static constexpr int column(int k, int j) {
    const int byte = 2 * j + k / 2;
    return (byte / 32 * 2 + k % 2) * 32 + byte % 32;
  }
};

// One row of x for one block: two steps in the order of the nibbles; eight zeros and the sums of
// the sub-blocks, of the rounded values.
[[gnu::always_inline]] inline void prepare_q4_k(const float* x, uint16_t* out) {
  alignas(64) float sums[16] = {};
  for (int step = 0; step < 2; ++step) {
    prepare_step<NibblesQ4K>(x + step * kStep, kStep, out + step * kStep);
    for (int i = 0; i < 4; ++i) {
      const float* p = x + step * kStep + i * 32;
      const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p));
      const __m512i bits = (__m512i)pair;
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
      const __m512 odd = _mm512_castsi512_ps(
          _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
      sums[8 + step * 4 + i] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
  }
  std::memcpy(out + 2 * kStep, sums, sizeof sums);
}

// Scales and negated minima of a block, each times the block's own, which is exact.
[[gnu::always_inline]] inline void q4_k_scales(const uint8_t* block, float* dst) {
  const KCodes own_codes = k_codes(block);
  const __m128i codes = _mm_set_epi64x(static_cast<long long>(own_codes.minima),
                                       static_cast<long long>(own_codes.scales));
  uint32_t halves;
  std::memcpy(&halves, block, 4);
  const __m128 own = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(halves)));  // d, dmin
  const __m512i pick = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  __m512 factor = _mm512_permutexvar_ps(pick, _mm512_castps128_ps512(own));
  factor = _mm512_castsi512_ps(_mm512_mask_xor_epi32(
      _mm512_castps_si512(factor), 0xff00, _mm512_castps_si512(factor),
      _mm512_set1_epi32(static_cast<int>(0x80000000u))));
  _mm512_storeu_ps(dst, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)), factor));
}

// kRows weight rows against all activation rows; the same operations whatever both numbers are.
template <int kRows>
struct Q4KTile {
  const MatrixView& w;
  const int64_t row;
  const uint16_t* const x;  // [blocks][num_rows][kQ4KInputs]
  const int num_rows;
  float* const scales;  // [kRows][blocks][16]
  const NextRows next;
  const __m512i table = load_table(kUnsignedValues);

  template <bool kSingle>
  [[gnu::always_inline]] void step(const uint8_t* const* p, const float* const* scale, int half,
                                   const uint16_t* input, __m512 (*total)[kRows]) {
    const __m512i first_half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    const __m512i low_index = _mm512_add_epi32(first_half, _mm512_set1_epi32(4 * half));
    const __m512i high_index = _mm512_add_epi32(low_index, _mm512_set1_epi32(1));
    __m512i weight[kRows][4];
    __m512 low_scale[kRows], high_scale[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const __m512i words = _mm512_loadu_si512(p[i] + 16 + 64 * half);
      weight[i][0] = _mm512_permutexvar_epi16(words, table);
      weight[i][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
      weight[i][2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
      weight[i][3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
      const __m512 all = _mm512_loadu_ps(scale[i]);
      low_scale[i] = _mm512_permutexvar_ps(low_index, all);
      high_scale[i] = _mm512_permutexvar_ps(high_index, all);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r, input += kQ4KInputs) {
      const uint16_t* own = input + half * kStep;
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const auto add = [&](__m512 sum, int k) {
          return _mm512_dpbf16_ps(sum, (__m512bh)weight[i][k],
                                  (__m512bh)_mm512_loadu_si512(own + k * 32));
        };
        const __m512 low = add(add(_mm512_setzero_ps(), 0), 2);
        const __m512 high = add(add(_mm512_setzero_ps(), 1), 3);
        total[r][i] = _mm512_fmadd_ps(low, low_scale[i], total[r][i]);
        total[r][i] = _mm512_fmadd_ps(high, high_scale[i], total[r][i]);
      }
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(float* const* y) {
    const int64_t blocks = w.cols / 256;
    const int rows_of_x = kSingle ? 1 : num_rows;
    __m512 total[kSingle ? 1 : kMaxGemvRows][kRows];
    for (int r = 0; r < rows_of_x; ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const uint8_t* p[kRows];
    const float* scale[kRows];
    for (int i = 0; i < kRows; ++i) {
      p[i] = w.data + (row + i) * w.row_stride_bytes;
      scale[i] = scales + i * blocks * 16;
      for (int64_t b = 0; b < blocks; ++b)
        q4_k_scales(p[i] + b * kQ4KBytes, scales + (i * blocks + b) * 16);
    }
    const uint16_t* input = x;
    const uint8_t* ahead = next.rows;
    for (int64_t b = 0; b < blocks; ++b, input += num_rows * kQ4KInputs, ahead += kQ4KBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        for (int64_t byte = 0; byte < kQ4KBytes; byte += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + i * next.stride_bytes + byte),
                       _MM_HINT_T0);
      step<kSingle>(p, scale, 0, input, total);
      step<kSingle>(p, scale, 1, input, total);
      for (int r = 0; r < rows_of_x; ++r) {
        const __m512 sums = _mm512_loadu_ps(input + r * kQ4KInputs + 2 * kStep);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          total[r][i] = _mm512_fmadd_ps(sums, _mm512_loadu_ps(scale[i]), total[r][i]);
      }
      for (int i = 0; i < kRows; ++i) {
        p[i] += kQ4KBytes;
        scale[i] += 16;
      }
    }
    for (int r = 0; r < rows_of_x; ++r)
      for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
  }
};

}  // namespace matmul_avx512bf16
}  // namespace moechat
