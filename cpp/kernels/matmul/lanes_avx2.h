// 8 float lanes of AVX2 (with FMA and F16C), and what decoders are made of. Only for files of that
// suffix.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/matrix_view.h"
#include "common/number_formats.h"
#include "kernels/matmul/k_codes.h"

namespace moechat {
namespace matmul_avx2 {

using Lanes = __m256;
using Ints = uint32_t __attribute__((vector_size(32)));  // lanes of 32 bits; takes operators
constexpr int kLanes = 8;
constexpr int kGemmRows = 6;      // register block of gemm: rows x vectors of columns
constexpr int kGemmVectors = 2;
constexpr int kOuterRows = 4;     // register block of gemv_transposed
constexpr int kOuterVectors = 2;

[[gnu::always_inline]] inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
[[gnu::always_inline]] inline Lanes zero() { return _mm256_setzero_ps(); }
[[gnu::always_inline]] inline Lanes broadcast(float v) { return _mm256_set1_ps(v); }
[[gnu::always_inline]] inline Lanes load(const float* p) { return _mm256_loadu_ps(p); }
[[gnu::always_inline]] inline Lanes load(const float* p, int64_t n) {
  return _mm256_maskload_ps(p, first(n));
}
// Zeros behind the first n; nothing is read when n <= 0.
[[gnu::always_inline]] inline Lanes load_some(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : n > 0 ? load(p, n) : zero();
}
[[gnu::always_inline]] inline void store(float* p, Lanes v) { _mm256_storeu_ps(p, v); }
[[gnu::always_inline]] inline void store(float* p, Lanes v, int64_t n) {
  _mm256_maskstore_ps(p, first(n), v);
}
// Lanes [begin, end) alone are touched, zeros stand for the others.
[[gnu::always_inline]] inline __m256i between(int64_t begin, int64_t end) {
  return _mm256_andnot_si256(first(begin), first(end));
}
[[gnu::always_inline]] inline Lanes load_between(const float* p, int64_t begin, int64_t end) {
  return _mm256_maskload_ps(p, between(begin, end));
}
[[gnu::always_inline]] inline void store_between(float* p, Lanes v, int64_t begin, int64_t end) {
  _mm256_maskstore_ps(p, between(begin, end), v);
}
[[gnu::always_inline]] inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
[[gnu::always_inline]] inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
[[gnu::always_inline]] inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
[[gnu::always_inline]] inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return _mm256_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline float sum(Lanes v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// Nearest even, NaN kept: the vector form of round_to_bf16.
[[gnu::always_inline]] inline Lanes round_bf16(Lanes v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i kept = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(kept), v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

// Zeros in all lanes but the first n; n may lie outside 0..kLanes.
[[gnu::always_inline]] inline Lanes keep_first(Lanes v, int64_t n) {
  return _mm256_and_ps(v, _mm256_castsi256_ps(first(n)));
}

[[gnu::always_inline]] inline Ints load_words(const uint8_t* p) {
  return (Ints)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// Lane i gets the int32 that holds nibble i of the run at p.
[[gnu::always_inline]] inline Ints words_of_nibbles(const uint8_t* p) {
  return (Ints)_mm256_set1_epi32(static_cast<int>(load_u32(p)));
}
[[gnu::always_inline]] inline Ints load_bytes(const uint8_t* p) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline Ints load_signed_bytes(const uint8_t* p) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline Ints load_halves(const uint8_t* p) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Of signed integers.
[[gnu::always_inline]] inline Lanes to_float(Ints v) { return _mm256_cvtepi32_ps((__m256i)v); }
[[gnu::always_inline]] inline Lanes from_bits(Ints v) { return (Lanes)v; }
[[gnu::always_inline]] inline Lanes load_f16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline float f16_at(const uint8_t* p) { return _cvtsh_ss(load_u16(p)); }

// Values of 4-bit codes; the upper bits of a lane are ignored.
[[gnu::always_inline]] inline Lanes e2m1(Ints code) {
  const Lanes values = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const Ints sign = (code & 8u) << 28;
  return _mm256_or_ps(_mm256_permutevar8x32_ps(values, (__m256i)code), from_bits(sign));
}
[[gnu::always_inline]] inline Lanes int4(Ints code) {  // code - 8
  return to_float((code & 15u) - 8u);
}

// FP8 e4m3 as FP16 bits: exponent bias 7 against 15, so the value is 2^-8 of the true one.
// Subnormals are exact. The NaN codes become FP16 NaN where kNaN, else some number.
template <bool kNaN>
[[gnu::always_inline]] inline Lanes load_fp8(const uint8_t* p) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);  // sign in bits 15 and 14
  __m128i half = _mm_and_si128(shifted, _mm_set1_epi16(static_cast<short>(0xbfff)));
  if constexpr (kNaN) {
    const __m128i magnitude = _mm_or_si128(shifted, _mm_set1_epi16(static_cast<short>(0xc000)));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(static_cast<short>(0xff80)));
    half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  }
  return _mm256_cvtph_ps(half);
}

// Remembers whether any FP8 code it has seen is NaN.
struct NaNProbe {
  __m256i largest = _mm256_setzero_si256();

  [[gnu::always_inline]] void add(const uint8_t* codes, int64_t n) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
      add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    if (i >= n) return;
    alignas(32) uint8_t bytes[32] = {};
    std::memcpy(bytes, codes + i, static_cast<size_t>(n - i));
    add(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)));
  }
  [[gnu::always_inline]] void add(__m256i codes) {
    largest = _mm256_max_epu8(largest, _mm256_or_si256(codes, _mm256_set1_epi8(-128)));
  }
  [[gnu::always_inline]] bool found() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1))) != 0;
  }
};

// rows[i] lane j <-> rows[j] lane i.
[[gnu::always_inline]] inline void transpose(Lanes* r) {
  __m256 t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  __m256 s[8];
  for (int i = 0; i < 2; ++i) {
    s[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    s[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    s[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    s[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
}

}  // namespace matmul_avx2
}  // namespace moechat
