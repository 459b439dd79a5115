// 16 float lanes of AVX-512 (F, BW, DQ, VL), and what decoders are made of. Only for files of that
// suffix.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/matrix_view.h"
#include "common/number_formats.h"
#include "kernels/matmul/k_codes.h"

namespace moechat {
namespace matmul_avx512 {

using Lanes = __m512;
using Ints = uint32_t __attribute__((vector_size(64)));  // lanes of 32 bits; takes operators
constexpr int kLanes = 16;
constexpr int kGemmRows = 12;     // register block of gemm: rows x vectors of columns
constexpr int kGemmVectors = 2;
constexpr int kOuterRows = 8;     // register block of gemv_transposed
constexpr int kOuterVectors = 2;

// The first n lanes; none when n < 0, all when n > kLanes.
[[gnu::always_inline]] inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>((1u << (n < 0 ? 0 : n > kLanes ? kLanes : n)) - 1u);
}
[[gnu::always_inline]] inline Lanes zero() { return _mm512_setzero_ps(); }
[[gnu::always_inline]] inline Lanes broadcast(float v) { return _mm512_set1_ps(v); }
[[gnu::always_inline]] inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
[[gnu::always_inline]] inline Lanes load(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(first(n), p);
}
// Zeros behind the first n; nothing is read when n <= 0.
[[gnu::always_inline]] inline Lanes load_some(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : n > 0 ? load(p, n) : zero();
}
[[gnu::always_inline]] inline void store(float* p, Lanes v) { _mm512_storeu_ps(p, v); }
[[gnu::always_inline]] inline void store(float* p, Lanes v, int64_t n) {
  _mm512_mask_storeu_ps(p, first(n), v);
}
// Lanes [begin, end) alone are touched, zeros stand for the others.
[[gnu::always_inline]] inline __mmask16 between(int64_t begin, int64_t end) {
  return static_cast<__mmask16>(first(end) & ~first(begin));
}
[[gnu::always_inline]] inline Lanes load_between(const float* p, int64_t begin, int64_t end) {
  return _mm512_maskz_loadu_ps(between(begin, end), p);
}
[[gnu::always_inline]] inline void store_between(float* p, Lanes v, int64_t begin, int64_t end) {
  _mm512_mask_storeu_ps(p, between(begin, end), v);
}
[[gnu::always_inline]] inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
[[gnu::always_inline]] inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
[[gnu::always_inline]] inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
[[gnu::always_inline]] inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return _mm512_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline float sum(Lanes v) { return _mm512_reduce_add_ps(v); }

// Nearest even, NaN kept: the vector form of round_to_bf16.
[[gnu::always_inline]] inline Lanes round_bf16(Lanes v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(kept, nan, bits));
}

// Zeros in all lanes but the first n; n may lie outside 0..kLanes.
[[gnu::always_inline]] inline Lanes keep_first(Lanes v, int64_t n) {
  return _mm512_maskz_mov_ps(first(n), v);
}

[[gnu::always_inline]] inline Ints load_words(const uint8_t* p) {
  return (Ints)_mm512_loadu_si512(p);
}
// Lane i gets the int32 that holds nibble i of the run at p.
[[gnu::always_inline]] inline Ints words_of_nibbles(const uint8_t* p) {
  const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (Ints)_mm512_permutexvar_epi32(index, _mm512_castsi128_si512(words));
}
[[gnu::always_inline]] inline Ints load_bytes(const uint8_t* p) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline Ints load_signed_bytes(const uint8_t* p) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline Ints load_halves(const uint8_t* p) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Of signed integers.
[[gnu::always_inline]] inline Lanes to_float(Ints v) { return _mm512_cvtepi32_ps((__m512i)v); }
[[gnu::always_inline]] inline Lanes from_bits(Ints v) { return (Lanes)v; }
[[gnu::always_inline]] inline Lanes load_f16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
[[gnu::always_inline]] inline float f16_at(const uint8_t* p) { return _cvtsh_ss(load_u16(p)); }

// Values of 4-bit codes; the upper bits of a lane are ignored.
[[gnu::always_inline]] inline Lanes e2m1(Ints code) {
  const Lanes values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3,
                                      -4, -6);
  return _mm512_permutexvar_ps((__m512i)code, values);
}
[[gnu::always_inline]] inline Lanes int4(Ints code) {  // code - 8
  const Lanes values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps((__m512i)code, values);
}

// FP8 e4m3 as FP16 bits: exponent bias 7 against 15, so the value is 2^-8 of the true one.
// Subnormals are exact. The NaN codes become FP16 NaN where kNaN, else some number.
template <bool kNaN>
[[gnu::always_inline]] inline Lanes load_fp8(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // sign in bits 15, 14
  __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbfff)));
  if constexpr (kNaN) {
    const __m256i magnitude =
        _mm256_or_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xc000)));
    const __mmask16 nan =
        _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(static_cast<short>(0xff80)));
    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
  }
  return _mm512_cvtph_ps(half);
}

// Remembers whether any FP8 code it has seen is NaN.
struct NaNProbe {
  __m512i largest = _mm512_setzero_si512();

  [[gnu::always_inline]] void add(const uint8_t* codes, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) add(_mm512_loadu_si512(codes + i));
    if (i < n) add(_mm512_maskz_loadu_epi8((1ull << (n - i)) - 1, codes + i));
  }
  [[gnu::always_inline]] void add(__m512i codes) {
    largest = _mm512_max_epu8(largest, _mm512_or_si512(codes, _mm512_set1_epi8(-128)));
  }
  [[gnu::always_inline]] bool found() const {
    return _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-1)) != 0;
  }
};

// rows[i] lane j <-> rows[j] lane i.
[[gnu::always_inline]] inline void transpose(Lanes* r) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}

}  // namespace matmul_avx512
}  // namespace moechat
