// gemv of 4-bit codes with vpdpwssd, 128 columns at a time. Only for files of that suffix.
//
// The 64 bytes of 128 codes are 32 words of four nibbles. vpermw looks up the low five bits of a
// word, so that a table of 16 values, there twice, needs no masking: register k of a step holds the
// values of nibble k of every word, and the activations are laid out alike (`column`). A lane of
// vpdpwssd then sums two words, that is 8 columns of one group of 32.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/matrix_view.h"
#include "kernels/matmul/fixed_inputs_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/next_rows.h"
#include "kernels/matmul/nibbles_avx512bf16.h"

namespace moechat {
namespace matmul_avx512bf16 {

// Codes as integers, of nibbles that may have others above them.
struct Int4 {
  static constexpr int16_t kOffset = 8;
  static constexpr float kUnit = 1.0f;
  const __m512i mask = _mm512_set1_epi16(15);
  [[gnu::always_inline]] __m512i operator()(__m512i words) const {
    return _mm512_and_si512(words, mask);
  }
};
inline constexpr int16_t kE2M1Halves[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
struct E2M1 {
  static constexpr int16_t kOffset = 0;
  static constexpr float kUnit = 0.5f;
  const __m512i table = load_table(kE2M1Halves);
  [[gnu::always_inline]] __m512i operator()(__m512i words) const {
    return _mm512_permutexvar_epi16(words, table);
  }
};

// Rows of nibbles, low first; scales in a grid.
template <typename Code>
struct NibbleRow : Code {
  static constexpr bool kSums = false;
  static constexpr bool kScaleInBlock = false;
  static constexpr int64_t kStepBytes = 64;
  // The column of a step that nibble k of word j holds.
  static constexpr int column(int k, int j) { return 4 * j + k; }
  [[gnu::always_inline]] static __m512i words(const uint8_t* p) { return _mm512_loadu_si512(p); }
};
using NibblesInt4 = NibbleRow<Int4>;
using NibblesMXFP4 = NibbleRow<E2M1>;

// Blocks of 32 whose scale stands before 16 bytes; low nibbles are the first half.
template <int64_t kScaleBytes, typename Code>
struct NibbleBlocks : Code {
  static constexpr bool kSums = false;
  static constexpr bool kScaleInBlock = true;
  static constexpr int64_t kBlockBytes = kScaleBytes + 16;
  static constexpr int64_t kStepBytes = 4 * kBlockBytes;
  static constexpr int column(int k, int j) { return j / 8 * 32 + k % 2 * 16 + j % 8 * 2 + k / 2; }
  [[gnu::always_inline]] static __m512i words(const uint8_t* p) {
    const auto block = [p](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kBlockBytes + kScaleBytes));
    };
    __m512i all = _mm512_castsi128_si512(block(0));
    all = _mm512_inserti32x4(all, block(1), 1);
    all = _mm512_inserti32x4(all, block(2), 2);
    return _mm512_inserti32x4(all, block(3), 3);
  }
};

struct NibblesQ4_0 : NibbleBlocks<2, Int4> {
  // Four scales, each for four lanes.
  [[gnu::always_inline]] static __m512 scales(const uint8_t* p) {
    const __m512i index = _mm512_castsi256_si512(
        _mm256_setr_epi16(0, 0, 0, 0, 9, 9, 9, 9, 18, 18, 18, 18, 27, 27, 27, 27));
    const __m512i halves = _mm512_permutexvar_epi16(index, _mm512_loadu_si512(p));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  }
};

struct NibblesMXFP4Block : NibbleBlocks<1, E2M1> {
  [[gnu::always_inline]] static __m512 scales(const uint8_t* p) {
    const __m512i index =
        _mm512_setr_epi32(0, 0, 0, 0, 17, 17, 17, 17, 34, 34, 34, 34, 51, 51, 51, 51);
    const __m512i code =
        _mm512_maskz_permutexvar_epi8(0x1111111111111111u, index, _mm512_loadu_si512(p));
    __m512i bits = _mm512_slli_epi32(code, 23);
    bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(code, code),
                                 _mm512_set1_epi32(0x00400000));  // 2^-127 is denormal
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255)),
                                 _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(bits);
  }
};

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

// The sums of 16 lanes, four each of four groups of 32 columns, of four weight rows, as one: of
// each group the rows' sums side by side.
[[gnu::always_inline]] inline __m512i join_sums(const __m512i* rows) {
  const auto halves = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i first = halves(rows[0], rows[1]), last = halves(rows[2], rows[3]);
  return _mm512_add_epi32(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
}
// Scales of four rows, the same on the four lanes of a group, in the order of join_sums.
[[gnu::always_inline]] inline __m512 join_scales(const __m512* rows) {
  const __m512 first = _mm512_mask_mov_ps(rows[0], 0x2222, rows[1]);
  const __m512 last = _mm512_mask_mov_ps(rows[2], 0x8888, rows[3]);
  return _mm512_mask_mov_ps(first, 0xcccc, last);
}
// Four rows' totals of every fourth group, summed.
[[gnu::always_inline]] inline __m128 sum_groups(__m512 total) {
  const __m256 pairs =
      _mm256_add_ps(_mm512_castps512_ps256(total), _mm512_extractf32x8_ps(total, 1));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

constexpr int kNibbleRows = 4;  // weight rows of a tile

// Up to kNibbleRows weight rows against all activation rows. Per (weight row, activation row): the
// sum of a group of 32 columns, which is exact, times the two scales into one of four totals, in
// turn; then the totals. With kSingle (one activation row) the weights never leave the registers.
template <typename Nibbles>
struct NibbleTile {
  const MatrixView& w;
  const int64_t row;
  const int64_t rows;    // the last of which stands for those that are missing
  const FixedInputs* x;  // [blocks of kFixedColumns][num_rows]
  const int num_rows;
  const float* scales;  // [kNibbleRows], scale_stride apart
  const int64_t scale_stride;
  const NextRows next;
  const Nibbles nibbles{};

  // Step `half` of the inputs.
  template <bool kSingle>
  [[gnu::always_inline]] void step(const uint8_t* const* p, int64_t offset,
                                   const NibbleScales& order, int half, __m512* total) {
    __m512 scale[kNibbleRows];
    __m512i weight[kNibbleRows][4];
#pragma GCC unroll 4
    for (int i = 0; i < kNibbleRows; ++i) {
      if constexpr (Nibbles::kScaleInBlock) {
        scale[i] = Nibbles::scales(p[i] + offset);
      } else {
        const __m128 four = _mm_loadu_ps(scales + i * scale_stride);
        scale[i] = _mm512_permutexvar_ps(order.index, _mm512_castps128_ps512(four));
      }
      const __m512i words = Nibbles::words(p[i] + offset);
      weight[i][0] = nibbles(words);
      weight[i][1] = nibbles(_mm512_srli_epi16(words, 4));
      weight[i][2] = nibbles(_mm512_srli_epi16(words, 8));
      weight[i][3] = nibbles(_mm512_srli_epi16(words, 12));
    }
    const __m512 joined = join_scales(scale);
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r) {
      const FixedInputs& input = x[r];
      __m512i sums[kNibbleRows];
#pragma GCC unroll 4
      for (int i = 0; i < kNibbleRows; ++i) sums[i] = _mm512_load_si512(input.start[half]);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const __m512i inputs = _mm512_load_si512(input.values + half * kStep + k * 32);
#pragma GCC unroll 4
        for (int i = 0; i < kNibbleRows; ++i)
          sums[i] = _mm512_dpwssd_epi32(sums[i], weight[i][k], inputs);
      }
      total[r] = _mm512_fmadd_ps(scaled(join_sums(sums), input), joined, total[r]);
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(const NibbleScales& order, float* const* y) {
    __m512 total[kSingle ? 1 : kMaxGemvRows];
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r) total[r] = _mm512_setzero_ps();
    const uint8_t* p[kNibbleRows];
    for (int i = 0; i < kNibbleRows; ++i)
      p[i] = w.data + (row + (i < rows ? i : rows - 1)) * w.row_stride_bytes;
    int64_t offset = 0, left = order.steps;
    const auto whole_step = [&](int half) {
#pragma GCC unroll 4
      for (int i = 0; i < kNibbleRows; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(next.rows + i * next.stride_bytes + offset),
                     _MM_HINT_T0);
      step<kSingle>(p, offset, order, half, total);
      offset += Nibbles::kStepBytes;
      if (--left == 0) {
        left = order.steps;
        scales += order.stride;
      }
    };
    int64_t col = 0;
    for (; col + kFixedColumns <= w.cols; col += kFixedColumns, x += num_rows) {
      whole_step(0);
      whole_step(1);
    }
    int half = 0;
    if (col + kStep <= w.cols) {
      whole_step(half++);
      col += kStep;
    }
    if (col < w.cols) {  // bytes of its own, so that none behind the row's last one is read
      alignas(64) uint8_t bytes[kNibbleRows][Nibbles::kStepBytes] = {};
      const Unit unit = unit_of(w.format);
      const int64_t units = (w.cols - col + unit.cols - 1) / unit.cols;
      for (int i = 0; i < kNibbleRows; ++i) {
        std::memcpy(bytes[i], p[i] + offset, static_cast<size_t>(units * unit.bytes));
        p[i] = bytes[i];
      }
      step<kSingle>(p, 0, order, half, total);
    }
    const auto used = static_cast<__mmask8>((1 << rows) - 1);
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      _mm_mask_storeu_ps(y[r] + row, used, sum_groups(total[r]));
  }
};

}  // namespace matmul_avx512bf16
}  // namespace moechat
