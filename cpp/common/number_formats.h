// Scalar conversions of the number formats: the plain definition every kernel is checked against.
// Header-only and always inlined, so that a kernel file's compile flags never leak into others.
#pragma once
#include <cstdint>
#include <cstring>

namespace moechat {

[[gnu::always_inline]] inline float load_f32(const void* p) {
  float v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

[[gnu::always_inline]] inline uint16_t load_u16(const void* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

[[gnu::always_inline]] inline uint32_t load_u32(const void* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

[[gnu::always_inline]] inline float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return load_f32(&wide);
}

// Round to nearest even; NaN stays NaN (quiet).
[[gnu::always_inline]] inline uint16_t f32_to_bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[gnu::always_inline]] inline float round_to_bf16(float v) { return bf16_to_f32(f32_to_bf16(v)); }

// FP8 e4m3 (OCP "E4M3FN"): bias 7, no infinity, 0x7F and 0xFF are NaN, subnormals in 2^-9 steps.
[[gnu::always_inline]] inline float fp8_e4m3_to_f32(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t exponent = (code >> 3) & 0xfu, mantissa = code & 7u;
  uint32_t bits;
  if ((code & 0x7fu) == 0x7fu) {
    bits = 0x7fc00000u;
  } else if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    std::memcpy(&bits, &magnitude, sizeof bits);
  } else {
    bits = ((exponent + 120u) << 23) | (mantissa << 20);
  }
  bits |= sign;
  return load_f32(&bits);
}

// IEEE 754 binary16, exact; NaN stays NaN.
[[gnu::always_inline]] inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &magnitude, sizeof bits);
  } else {
    bits = ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
  }
  bits |= sign;
  return load_f32(&bits);
}

// Round to nearest even, as F16C does: 65520 and above become infinity, NaN stays NaN (quiet).
[[gnu::always_inline]] inline uint16_t f32_to_f16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: steps of 2^-24, which are 0.5's last bit
    const float shifted = load_f32(&magnitude) + 0.5f;
    uint32_t shifted_bits;
    std::memcpy(&shifted_bits, &shifted, sizeof shifted_bits);
    return static_cast<uint16_t>(sign | (shifted_bits - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// E8M0 (OCP MX specification 1.0, section 5.4.1): 2^(code - 127); 255 is NaN. 2^-127 is denormal.
[[gnu::always_inline]] inline float e8m0_to_f32(uint8_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : uint32_t{code} << 23;
  return load_f32(&bits);
}

// E2M1 (the same, section 5.3.3): sign, then 0, 0.5, 1, 1.5, 2, 3, 4, 6. Takes the low four bits.
[[gnu::always_inline]] inline float e2m1_to_f32(uint32_t code) {
  const uint32_t exponent = (code >> 1) & 3u, mantissa = code & 1u;
  const uint32_t magnitude = exponent > 0  ? ((exponent + 126u) << 23) | (mantissa << 22)
                             : mantissa > 0 ? 0x3f000000u
                                            : 0u;
  const uint32_t bits = magnitude | ((code & 8u) << 28);
  return load_f32(&bits);
}

}  // namespace moechat
