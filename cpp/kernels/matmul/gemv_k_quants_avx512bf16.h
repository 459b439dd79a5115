// gemv of GGUF's kQ4_K, kQ5_K and kQ6_K with vpdpwssd. Only for files of that suffix.
//
//   y = sum over blocks of 256:  d * (sum of code * sub-block scale * x)  -  dmin * (sum of minima
//   * sums of x)
//
// Code times the scale of its sub-block is an integer of 13 bits at most, so that the first sum is
// exact over the whole block: 4096 * 32640 * 16 products a lane stay below 2^31.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "common/number_formats.h"
#include "kernels/matmul/fixed_inputs_avx512bf16.h"
#include "kernels/matmul/k_codes.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/next_rows.h"

namespace moechat {
namespace matmul_avx512bf16 {

[[gnu::always_inline]] inline __m512 broadcast_half(const uint8_t* p) {
  return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}

// 32 bytes, twice.
[[gnu::always_inline]] inline __m512i twice(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// For vpmultishiftqb: brings bit `low` of the lower 32 bytes, bit `high` of the upper ones, to
// bit 4.
struct ToBit4 {
  alignas(64) uint8_t offset[64];
  constexpr ToBit4(int low, int high) : offset() {
    for (int i = 0; i < 64; ++i)
      offset[i] = static_cast<uint8_t>((8 * (i % 8) + (i < 32 ? low : high) - 4) & 63);
  }
  [[gnu::always_inline]] __m512i operator()(__m512i bytes) const {
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(offset), bytes);
  }
};

// The low four bits of `codes`, the others of `upper`.
[[gnu::always_inline]] inline __m512i join_codes(__m512i codes, __m512i upper) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), codes, upper, 0xca);
}

// d, and what the sub-blocks of 32 add: shared by kQ4_K and kQ5_K.
struct SubBlocks32 {
  static constexpr int16_t kOffset = 0;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kSums = true;
  // Register k holds nibble k of every word of the 64 bytes.
  static constexpr int column(int k, int j) {
    const int byte = 2 * j + k / 2;
    return (byte / 32 * 2 + k % 2) * 32 + byte % 32;
  }

  const uint8_t* block;
  __m512 d, minima;  // lanes 0-7: -dmin * minimum
  __m512i scales;    // words 0-7

  [[gnu::always_inline]] explicit SubBlocks32(const uint8_t* p) : block(p), d(broadcast_half(p)) {
    const KCodes codes = k_codes(p);
    const auto bytes = [](uint64_t eight) {
      return _mm_cvtsi64_si128(static_cast<long long>(eight));
    };
    const __m512 negative = _mm512_xor_ps(broadcast_half(p + 2), _mm512_set1_ps(-0.0f));
    minima = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(codes.minima))), negative);
    scales = _mm512_zextsi128_si512(_mm_cvtepu8_epi16(bytes(codes.scales)));
  }
  // Scales of the sub-blocks that the low (0) or high (1) nibbles of a half belong to, word by
  // word.
  [[gnu::always_inline]] __m512i scales_of(int half, int nibble) const {
    const int first = 4 * half + nibble;
    const __m256i low = _mm256_set1_epi16(static_cast<int16_t>(first));
    const __m256i high = _mm256_set1_epi16(static_cast<int16_t>(first + 2));
    return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1),
                                    scales);
  }
};

struct BlockQ4K : SubBlocks32 {
  static constexpr int64_t kBytes = 144;
  using SubBlocks32::SubBlocks32;

  // Of 128 columns: code times scale.
  [[gnu::always_inline]] void weights(int half, __m512i* out) const {
    const __m512i words = _mm512_loadu_si512(block + 16 + 64 * half);
    const __m512i mask = _mm512_set1_epi16(15);
    const __m512i low = scales_of(half, 0), high = scales_of(half, 1);
    out[0] = _mm512_mullo_epi16(_mm512_and_si512(words, mask), low);
    out[1] = _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(words, 4), mask), high);
    out[2] = _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(words, 8), mask), low);
    out[3] = _mm512_mullo_epi16(_mm512_srli_epi16(words, 12), high);
  }
};

struct BlockQ5K : SubBlocks32 {
  static constexpr int64_t kBytes = 176;
  using SubBlocks32::SubBlocks32;

  [[gnu::always_inline]] void weights(int half, __m512i* out) const {
    static constexpr ToBit4 kFifth[2][2] = {{{0, 2}, {1, 3}}, {{4, 6}, {5, 7}}};
    const __m512i words = _mm512_loadu_si512(block + 48 + 64 * half), fifth = twice(block + 16);
    const __m512i mask = _mm512_set1_epi16(31);
    for (int nibble = 0; nibble < 2; ++nibble) {
      const __m512i codes = nibble == 0 ? words : _mm512_srli_epi16(words, 4);
      const __m512i joined = join_codes(codes, kFifth[half][nibble](fifth));
      const __m512i scale = scales_of(half, nibble);
      out[nibble] = _mm512_mullo_epi16(_mm512_and_si512(joined, mask), scale);
      out[nibble + 2] =
          _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(joined, 8), mask), scale);
    }
  }
};

struct BlockQ6K {
  static constexpr int64_t kBytes = 210;
  static constexpr int16_t kOffset = 0;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kSums = false;
  // Registers 0 and 1 hold even and odd bytes' low nibbles, 2 and 3 the high ones.
  static constexpr int column(int k, int j) {
    const int byte = 2 * j + k % 2;
    return (k / 2 * 2 + byte / 32) * 32 + byte % 32;
  }

  const uint8_t* block;
  __m512 d, minima;
  __m512i scales;  // words 0-15, times 256

  [[gnu::always_inline]] explicit BlockQ6K(const uint8_t* p)
      : block(p), d(broadcast_half(p + 208)), minima(_mm512_setzero_ps()) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 192));
    scales = _mm512_zextsi256_si512(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 8));
  }
  [[gnu::always_inline]] void weights(int half, __m512i* out) const {
    static constexpr ToBit4 kUpper[2] = {{0, 2}, {4, 6}};
    static constexpr int16_t kFirst[32] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                           2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
    const __m512i words = _mm512_loadu_si512(block + 64 * half),
                  upper = twice(block + 128 + 32 * half);
    for (int nibble = 0; nibble < 2; ++nibble) {
      const __m512i codes = nibble == 0 ? words : _mm512_srli_epi16(words, 4);
      __m512i joined = join_codes(codes, kUpper[nibble](upper));
      joined =
          _mm512_sub_epi8(_mm512_and_si512(joined, _mm512_set1_epi8(63)), _mm512_set1_epi8(32));
      const __m512i index =
          _mm512_add_epi16(_mm512_loadu_si512(kFirst),
                           _mm512_set1_epi16(static_cast<int16_t>(8 * half + 4 * nibble)));
      const __m512i scale = _mm512_permutexvar_epi16(index, scales);
      // (256 code) (256 scale) / 65536
      out[2 * nibble] = _mm512_mulhi_epi16(_mm512_slli_epi16(joined, 8), scale);
      out[2 * nibble + 1] = _mm512_mulhi_epi16(
          _mm512_and_si512(joined, _mm512_set1_epi16(static_cast<int16_t>(0xff00))), scale);
    }
  }
};

// kRows weight rows against all activation rows; the same operations whatever both numbers are.
template <typename Block, int kRows>
struct KTile {
  const MatrixView& w;
  const int64_t row;
  const FixedInputs* const x;  // [blocks][num_rows]
  const int num_rows;
  const NextRows next;

  // One block of kRows weight rows.
  template <bool kSingle>
  [[gnu::always_inline]] void block(const uint8_t* const* p, const FixedInputs* input,
                                    __m512 (*total)[kRows]) {
    const int rows_of_x = kSingle ? 1 : num_rows;
    __m512i sums[kSingle ? 1 : kMaxGemvRows][kRows];
    __m512 d[kRows], minima[kRows];
    for (int r = 0; r < rows_of_x; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sums[r][i] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512i weight[kRows][4];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const Block own(p[i]);
        own.weights(half, weight[i]);
        d[i] = own.d;
        minima[i] = own.minima;
      }
      for (int r = 0; r < rows_of_x; ++r)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const __m512i inputs = _mm512_load_si512(input[r].values + half * kStep + k * 32);
#pragma GCC unroll 4
          for (int i = 0; i < kRows; ++i)
            sums[r][i] = _mm512_dpwssd_epi32(sums[r][i], weight[i][k], inputs);
        }
    }
    for (int r = 0; r < rows_of_x; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        total[r][i] = _mm512_fmadd_ps(scaled(sums[r][i], input[r]), d[i], total[r][i]);
        if constexpr (Block::kSums)
          total[r][i] = _mm512_fmadd_ps(_mm512_load_ps(input[r].sums), minima[i], total[r][i]);
      }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(float* const* y) {
    const int rows_of_x = kSingle ? 1 : num_rows;
    __m512 total[kSingle ? 1 : kMaxGemvRows][kRows];
    for (int r = 0; r < rows_of_x; ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const uint8_t* p[kRows];
    for (int i = 0; i < kRows; ++i) p[i] = w.data + (row + i) * w.row_stride_bytes;
    const FixedInputs* input = x;
    const uint8_t* ahead = next.rows;
    for (int64_t b = 0; b < w.cols / kFixedColumns;
         ++b, input += num_rows, ahead += Block::kBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        for (int64_t byte = 0; byte < Block::kBytes; byte += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + i * next.stride_bytes + byte),
                       _MM_HINT_T0);
      block<kSingle>(p, input, total);
      for (int i = 0; i < kRows; ++i) p[i] += Block::kBytes;
    }
    for (int r = 0; r < rows_of_x; ++r)
      for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
  }
};

}  // namespace matmul_avx512bf16
}  // namespace moechat
