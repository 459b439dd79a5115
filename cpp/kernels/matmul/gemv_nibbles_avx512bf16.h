// gemv of 4-bit codes with vdpbf16ps. Only for files of that suffix.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels/matmul/groups.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/nibbles_avx512bf16.h"

namespace moechat {
namespace matmul_avx512bf16 {

// Scales of the grid, a float32 row each weight row: `index` picks those of the 16 lanes from four,
// and `steps` steps use the same four.
struct NibbleScales {
  __m512i index;
  int64_t steps;
  int64_t stride;  // to the next four
};

// Whether 128 columns from the first on meet the scales in one of the ways that NibbleScales says.
[[gnu::always_inline]] inline bool regular_scales(const MatrixView& w) {
  const int64_t block = w.block_cols;
  return w.col_origin % block == 0 &&
         (block == 32 || block == 64 || block % kStep == 0 || block >= w.cols);
}

[[gnu::always_inline]] inline NibbleScales nibble_scales(const MatrixView& w) {
  const int64_t block = w.block_cols;
  if (block == 32 && w.cols > 32)
    return {_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), 1, 4};
  if (block == 64 && w.cols > 64)
    return {_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), 1, 2};
  return {_mm512_setzero_si512(), block >= w.cols ? w.cols : block / kStep, 1};
}

// Weight rows that are fetched while others are multiplied.
struct NextRows {
  const uint8_t* rows;
  int64_t stride_bytes;
};

// kRows weight rows against all activation rows. Per (weight row, activation row): four vdpbf16ps a
// step into a fresh register, times the scales into the total; the same whatever kRows and num_rows
// are. With kSingle (one activation row) the weights never leave the registers.
template <typename Nibbles, int kRows>
struct NibbleTile {
  const MatrixView& w;
  const int64_t row;
  const uint16_t* const x;  // [steps][num_rows][4][32]
  const int num_rows;
  const float* const scales;  // [kRows], scale_stride apart
  const int64_t scale_stride;
  const NextRows next;
  const __m512i table = load_table(Nibbles::kValues);

  template <bool kSingle>
  [[gnu::always_inline]] void step(const uint8_t* const* p, const NibbleScales& order,
                                   int64_t scale_index, const uint16_t* input,
                                   __m512 (*total)[kRows]) {
    __m512 scale[kRows];
    __m512i weight[kRows][4];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      if constexpr (Nibbles::kScaleInBlock) {
        scale[i] = Nibbles::scales(p[i]);
      } else {
        const __m128 four = _mm_loadu_ps(scales + i * scale_stride + scale_index);
        scale[i] = _mm512_permutexvar_ps(order.index, _mm512_castps128_ps512(four));
      }
      const __m512i words = Nibbles::words(p[i]);
      weight[i][0] = _mm512_permutexvar_epi16(words, table);
      weight[i][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
      weight[i][2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
      weight[i][3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r, input += kStep) {
      __m512 acc[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const __m512bh inputs = (__m512bh)_mm512_loadu_si512(input + k * 32);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)weight[i][k], inputs);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_fmadd_ps(acc[i], scale[i], total[r][i]);
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(const NibbleScales& order, float* const* y) {
    __m512 total[kSingle ? 1 : kMaxGemvRows][kRows];
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const uint8_t* p[kRows];
    for (int i = 0; i < kRows; ++i) p[i] = w.data + (row + i) * w.row_stride_bytes;
    const uint8_t* ahead = next.rows;
    const uint16_t* input = x;
    int64_t scale_index = 0, left = order.steps;
    int64_t col = 0;
    for (; col + kStep <= w.cols; col += kStep, input += num_rows * kStep) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + i * next.stride_bytes), _MM_HINT_T0);
      ahead += Nibbles::kStepBytes;
      step<kSingle>(p, order, scale_index, input, total);
      for (int i = 0; i < kRows; ++i) p[i] += Nibbles::kStepBytes;
      if (--left == 0) {
        left = order.steps;
        scale_index += order.stride;
      }
    }
    if (col < w.cols) {  // bytes of its own, so that none behind the row's last one is read
      alignas(64) uint8_t bytes[kRows][Nibbles::kStepBytes] = {};
      const Unit unit = unit_of(w.format);
      const int64_t units = (w.cols - col + unit.cols - 1) / unit.cols;
      const auto size = static_cast<size_t>(units * unit.bytes);
      for (int i = 0; i < kRows; ++i) {
        std::memcpy(bytes[i], p[i], size);
        p[i] = bytes[i];
      }
      step<kSingle>(p, order, scale_index, input, total);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
  }
};

}  // namespace matmul_avx512bf16
}  // namespace moechat
