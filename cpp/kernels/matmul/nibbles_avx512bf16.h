// 4-bit codes looked up as BF16. Only for files of that suffix.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace moechat {
namespace matmul_avx512bf16 {

// -8 .. 7, and E2M1 by code.
inline constexpr uint16_t kInt4Values[16] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
inline constexpr uint16_t kE2M1Values[16] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// The table twice: vpermw looks up the low five bits of a word, so that nothing need be masked.
template <typename Value>
[[gnu::always_inline]] inline __m512i load_table(const Value* values) {
  static_assert(sizeof(Value) == 2);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_broadcast_i64x4(half);
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
