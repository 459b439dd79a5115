// FP8 and BF16 weights as registers of BF16, and activations to match. Only for files of that
// suffix.
//
// FP8 codes are looked up, high and low byte of their BF16 value apart (two vpermi2b on a 128-entry
// table: exact, subnormals and NaN included; the sign bit does not take part in the look-up).
// vdpbf16ps flushes denormal inputs and results; FP8 values times BF16 activations stay far above.
#pragma once
#include <immintrin.h>

#include "common/number_formats.h"
#include "kernels/matmul/groups.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int64_t kBlock = 64;                // columns decoded together
constexpr int64_t kVectors = kGroup / 32;     // registers of 32 BF16 a group

struct ByteTables {
  alignas(64) uint8_t high[128], low[128];
};

constexpr ByteTables make_tables() {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    int bits = 0;
    if (code == 127) {
      bits = 0x7fc0;
    } else if (exponent > 0) {
      bits = (exponent + 120) << 7 | mantissa << 4;
    } else if (mantissa > 0) {  // mantissa * 2^-9, normalised
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = (127 - 9 + top) << 7 | ((mantissa << (7 - top)) & 0x7f);
    }
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
    tables.low[code] = static_cast<uint8_t>(bits & 0xff);
  }
  return tables;
}
constexpr ByteTables kTables = make_tables();

[[gnu::always_inline]] inline __mmask64 first64(int64_t n) {
  return n >= 64 ? ~0ull : (1ull << n) - 1;
}

// GCC repeats a load for each instruction that overwrites what was loaded, and prefers to load
// again what a register could keep.
[[gnu::always_inline]] inline __m512i loaded_once(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}

// 64 weights as two registers of BF16. FP8: `even` holds the 8-element pieces 0, 2, 4, 6 of the
// block, `odd` the pieces 1, 3, 5, 7 (byte unpacking works within 128-bit lanes); the activations
// are laid out alike. Only the first n weights are read, zeros stand for the others.
struct DecoderFP8 {
  static constexpr Format kFormat = Format::kFP8;
  __m512i high0 = _mm512_load_si512(kTables.high), high1 = _mm512_load_si512(kTables.high + 64);
  __m512i low0 = _mm512_load_si512(kTables.low), low1 = _mm512_load_si512(kTables.low + 64);
  __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));

  // The same, in registers for the loop that follows.
  [[gnu::always_inline]] DecoderFP8 in_registers() const {
    DecoderFP8 copy;
    copy.high0 = loaded_once(high0);
    copy.high1 = loaded_once(high1);
    copy.low0 = loaded_once(low0);
    copy.low1 = loaded_once(low1);
    copy.sign = loaded_once(sign);
    return copy;
  }

  [[gnu::always_inline]] void operator()(const uint8_t* p, int64_t n, __m512i* out) const {
    const __m512i codes =
        loaded_once(n >= kBlock ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(first64(n), p));
    __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
};

struct DecoderBF16 {
  static constexpr Format kFormat = Format::kBF16;
  [[gnu::always_inline]] void operator()(const uint8_t* p, int64_t n, __m512i* out) const {
    if (n >= kBlock) {
      out[0] = _mm512_loadu_si512(p);
      out[1] = _mm512_loadu_si512(p + 64);
      return;
    }
    const __mmask64 mask = first64(n);
    out[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), p);
    out[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), p + 64);
  }
};

// The inputs of one group as BF16, padded with zeros to kGroup and laid out as the decoder of
// `format` needs them.
[[gnu::always_inline]] inline void prepare_group(Format format, const Groups& g, const float* x,
                                                 uint16_t* out) {
  for (int64_t piece = 0; piece < kGroup / 16; ++piece) {
    const int64_t left = g.count() - piece * 16;
    const float* p = x + g.begin + piece * 16;
    const __m512 v = left >= 16  ? _mm512_loadu_ps(p)
                     : left > 0 ? _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), p)
                                : _mm512_setzero_ps();
    const __m256i bits = (__m256i)_mm512_cvtneps_pbh(v);
    uint16_t* block = out + piece / 4 * kBlock;
    if (format == Format::kFP8) {
      uint16_t* even = block + piece % 4 * 8;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(even), _mm256_castsi256_si128(bits));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(even + 32), _mm256_extracti128_si256(bits, 1));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + piece % 4 * 16), bits);
    }
  }
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
