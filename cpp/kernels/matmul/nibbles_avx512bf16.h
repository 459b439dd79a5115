// 4-bit codes as registers of BF16, 128 columns at a time. Only for files of that suffix.
//
// The 64 bytes of 128 codes are 32 words of four nibbles. vpermw looks up the low five bits of a
// word, so that a table of 16 values, there twice, needs no masking: register k of a step holds the
// values of nibble k of every word, and the activations are laid out alike (`column`). All values
// are exact in BF16. A lane of vdpbf16ps then sums two words, that is 8 columns of one group of 32.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/matrix_view.h"
#include "common/number_formats.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int64_t kStep = 128;  // columns

// -8 .. 7, and E2M1 by code.
inline constexpr uint16_t kInt4Values[16] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
inline constexpr uint16_t kE2M1Values[16] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

[[gnu::always_inline]] inline __m512i load_table(const uint16_t* values) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_broadcast_i64x4(half);
}

// Rows of nibbles, low first; scales in a grid.
template <const uint16_t* kTable>
struct NibbleRow {
  static constexpr bool kScaleInBlock = false;
  static constexpr const uint16_t* kValues = kTable;
  static constexpr int64_t kStepBytes = 64;
  // The column of a step that nibble k of word j holds.
  static constexpr int column(int k, int j) { return 4 * j + k; }
  [[gnu::always_inline]] static __m512i words(const uint8_t* p) { return _mm512_loadu_si512(p); }
};
using NibblesInt4 = NibbleRow<kInt4Values>;
using NibblesMXFP4 = NibbleRow<kE2M1Values>;

// Blocks of 32 whose scale stands before 16 bytes; low nibbles are the first half.
template <int64_t kScaleBytes, const uint16_t* kTable>
struct NibbleBlocks {
  static constexpr bool kScaleInBlock = true;
  static constexpr const uint16_t* kValues = kTable;
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

struct NibblesQ4_0 : NibbleBlocks<2, kInt4Values> {
  // Four scales, each for four lanes.
  [[gnu::always_inline]] static __m512 scales(const uint8_t* p) {
    const __m512i index = _mm512_castsi256_si512(
        _mm256_setr_epi16(0, 0, 0, 0, 9, 9, 9, 9, 18, 18, 18, 18, 27, 27, 27, 27));
    const __m512i halves = _mm512_permutexvar_epi16(index, _mm512_loadu_si512(p));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  }
};

struct NibblesMXFP4Block : NibbleBlocks<1, kE2M1Values> {
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

// Where word j of input register k comes from, among the 128 of a step.
template <typename Nibbles>
struct InputOrder {
  alignas(64) uint16_t column[4][32];
};
template <typename Nibbles>
constexpr InputOrder<Nibbles> make_order() {
  InputOrder<Nibbles> order{};
  for (int k = 0; k < 4; ++k)
    for (int j = 0; j < 32; ++j) order.column[k][j] = static_cast<uint16_t>(Nibbles::column(k, j));
  return order;
}
template <typename Nibbles>
inline constexpr InputOrder<Nibbles> kOrder = make_order<Nibbles>();

// The first n <= kStep inputs of a step as four registers of BF16, zeros for the others.
template <typename Nibbles>
[[gnu::always_inline]] inline void prepare_step(const float* x, int64_t n, uint16_t* out) {
  __m512i in[4];
  for (int i = 0; i < 4; ++i) {
    __m512 half[2];
    for (int h = 0; h < 2; ++h) {
      const int64_t left = n - i * 32 - h * 16;
      const __mmask16 mask = left >= 16  ? __mmask16{0xffff}
                             : left > 0 ? static_cast<__mmask16>((1u << left) - 1)
                                        : __mmask16{0};
      half[h] = _mm512_maskz_loadu_ps(mask, x + i * 32 + h * 16);
    }
    in[i] = (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]);
  }
  for (int k = 0; k < 4; ++k) {
    const __m512i index = _mm512_load_si512(kOrder<Nibbles>.column[k]);
    const __m512i low = _mm512_permutex2var_epi16(in[0], index, in[1]);
    const __m512i high = _mm512_permutex2var_epi16(in[2], index, in[3]);
    const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    _mm512_storeu_si512(out + k * 32, _mm512_mask_mov_epi16(low, upper, high));
  }
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
