// The 6-bit scales and minima of a block of kQ4_K or kQ5_K.
#pragma once
#include <cstdint>

#include "common/number_formats.h"

namespace moechat {

// Of the eight sub-blocks of 32, a byte each.
struct KCodes {
  uint64_t scales, minima;
};
[[gnu::always_inline]] inline KCodes k_codes(const uint8_t* block) {
  const uint32_t a = load_u32(block + 4), b = load_u32(block + 8), c = load_u32(block + 12);
  const uint32_t last_scales = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
  const uint32_t last_minima = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
  return {(a & 0x3f3f3f3fu) | uint64_t{last_scales} << 32,
          (b & 0x3f3f3f3fu) | uint64_t{last_minima} << 32};
}

}  // namespace moechat
