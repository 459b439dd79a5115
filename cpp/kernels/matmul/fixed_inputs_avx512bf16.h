// Activations in 16-bit fixed point, for weights that are integers times a scale. Only for files of
// that suffix.
//
// 256 columns share a power of two, 2^(e - 14) with e the exponent of their largest magnitude: what
// is within a factor of 128 of it keeps all eight bits of its BF16 value, what is smaller is
// rounded to 2^-15 of it (nearest even). Products with the weights' integers are then summed
// exactly, by vpdpwssd at four times the rate of vdpbf16ps on Intel's processors.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels/matmul/lanes_avx512.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int64_t kStep = 128;          // columns whose order a decoder chooses
constexpr int64_t kFixedColumns = 256;  // that share a power of two
constexpr int64_t kSumColumns = 32;

// 256 columns of one row of x. Infinities and NaN make the scale NaN.
struct alignas(64) FixedInputs {
  int16_t values[kFixedColumns];  // two steps, each four registers, in the decoder's order
  int32_t start[kFixedColumns / kStep][16];  // what the sums of a step begin with
  float
      sums[kFixedColumns / kSumColumns];  // if wanted: in the order of the columns, scale included
  float scale;
  float zeros[7];
};

// Where word j of register k of a step comes from, among its 128 columns.
struct InputOrder {
  alignas(64) uint16_t column[4][32];
};
template <typename Decoder>
constexpr InputOrder make_order() {
  InputOrder order{};
  for (int k = 0; k < 4; ++k)
    for (int j = 0; j < 32; ++j) order.column[k][j] = static_cast<uint16_t>(Decoder::column(k, j));
  return order;
}
template <typename Decoder>
inline constexpr InputOrder kOrder = make_order<Decoder>();

// 256 columns of a row of x in their own order.
struct FixedColumns {
  __m512i values[kFixedColumns / 32];
  float unit;  // what the integers are multiples of; NaN, with zeros, for what is not finite
};

// Of x[0, n) with n <= kFixedColumns, zeros behind.
[[gnu::always_inline]] inline FixedColumns fix_columns(const float* x, int64_t n) {
  constexpr int kRegisters = kFixedColumns / 16;
  __m512 rounded[kRegisters];
  __m512i largest = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
#pragma GCC unroll 16
  for (int i = 0; i < kRegisters; ++i) {
    const __m512 own = matmul_avx512::load_some(x + i * 16, n - i * 16);
    const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(own));
    const __m512i wide = _mm512_slli_epi32(bits, 16);
    rounded[i] = _mm512_castsi512_ps(wide);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(wide, magnitude));
  }
  constexpr int kFiniteExponent = 254,
                kLeastExponent = 16;  // so that the powers are normal numbers
  int exponent = _mm512_reduce_max_epi32(largest) >> 23;
  FixedColumns fixed;
  if (exponent > kFiniteExponent) {
    for (__m512i& values : fixed.values) values = _mm512_setzero_si512();
    fixed.unit = __builtin_nanf("");
    return fixed;
  }
  exponent = exponent < kLeastExponent ? kLeastExponent : exponent;
  const __m512 power = _mm512_castsi512_ps(_mm512_set1_epi32((268 - exponent) << 23));
  fixed.unit = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((exponent - 14) << 23)));
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters / 2; ++i) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i low = _mm512_cvt_roundps_epi32(_mm512_mul_ps(rounded[2 * i], power), kNearest);
    const __m512i high =
        _mm512_cvt_roundps_epi32(_mm512_mul_ps(rounded[2 * i + 1], power), kNearest);
    fixed.values[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                                         _mm512_cvtepi32_epi16(high), 1);
  }
  return fixed;
}

// The same for a decoder of weights (code - kOffset) * kUnit times a scale.
template <typename Decoder>
[[gnu::always_inline]] inline void fix_inputs(const float* x, int64_t n, FixedInputs& out) {
  const InputOrder& order = kOrder<Decoder>;
  const FixedColumns fixed = fix_columns(x, n);
  out.scale = fixed.unit * Decoder::kUnit;
  for (float& lane : out.zeros) lane = 0;
  if constexpr (Decoder::kSums) {
    const __m512i ones = _mm512_set1_epi16(1);
#pragma GCC unroll 8
    for (int i = 0; i < kFixedColumns / kSumColumns; ++i) {
      const __m512i pairs = _mm512_madd_epi16(fixed.values[i], ones);
      out.sums[i] = static_cast<float>(_mm512_reduce_add_epi32(pairs)) * fixed.unit;
    }
  }
#pragma GCC unroll 2
  for (int step = 0; step < kFixedColumns / kStep; ++step) {
    const __m512i* in = fixed.values + step * 4;
    __m512i start = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512i index = _mm512_load_si512(order.column[k]);
      const __m512i low = _mm512_permutex2var_epi16(in[0], index, in[1]);
      const __m512i high = _mm512_permutex2var_epi16(in[2], index, in[3]);
      const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
      const __m512i own = _mm512_mask_mov_epi16(low, upper, high);
      start = _mm512_dpwssd_epi32(start, own, _mm512_set1_epi16(-Decoder::kOffset));
      _mm512_store_si512(out.values + step * kStep + k * 32, own);
    }
    _mm512_store_si512(out.start[step], start);
  }
}

// 16 sums, times the scale of the inputs.
[[gnu::always_inline]] inline __m512 scaled(__m512i sums, const FixedInputs& input) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(input.scale));
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
