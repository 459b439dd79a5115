// Plain loops that the compiler turns into vectors. Compiled without contraction of multiplications
// and additions, so that all instruction sets round alike.

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding and taking it off rounds to nearest even
constexpr uint32_t kInfinityBits = 0x7f800000u;

inline uint32_t magnitude_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits & 0x7fffffffu;
}

// Bits of the largest magnitude: at least kInfinityBits when one is not finite.
inline uint32_t largest_bits(const float* v, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = magnitude_bits(v[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

inline float round_to_integer(float v) { return (v + kRounder) - kRounder; }

inline void encode_int8(const float* v, int64_t n, float inverse, uint8_t* payload) {
  for (int64_t i = 0; i < n; ++i) {
    float code = round_to_integer(v[i] * inverse);
    code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
    payload[i] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(code)));
  }
}

inline int32_t int4_code(float v, float inverse) {
  float code = round_to_integer(v * inverse);
  code = code > 7.0f ? 7.0f : code < -7.0f ? -7.0f : code;
  return static_cast<int32_t>(code) + 8;
}

inline void encode_int4(const float* v, int64_t n, float inverse, uint8_t* payload) {
  for (int64_t i = 0; i < n / 2; ++i)
    payload[i] = static_cast<uint8_t>(int4_code(v[2 * i], inverse) |
                                      int4_code(v[2 * i + 1], inverse) << 4);
  if (n % 2 != 0) payload[n / 2] = static_cast<uint8_t>(int4_code(v[n - 1], inverse) | 8 << 4);
}

inline bool encode(const KVPart* parts, int64_t num_parts, const float* row, const float* centre,
                   uint8_t* payload, uint16_t* scales) {
  constexpr int64_t kChunk = 1024;
  constexpr uint32_t kLargestHalf = 0x477fe000u;  // 65504
  alignas(64) float values[kChunk];
  for (int64_t p = 0; p < num_parts; ++p) {
    const KVPart& part = parts[p];
    const float* v = row + part.begin;
    if (part.width > kChunk) return false;
    if (centre != nullptr) {
      for (int64_t i = 0; i < part.width; ++i) values[i] = v[i] - centre[part.begin + i];
      v = values;
    }
    const uint32_t largest = largest_bits(v, part.width);
    if (largest >= kInfinityBits) return false;
    if (part.code == KVCode::kF16) {
      if (largest > kLargestHalf) return false;
      for (int64_t i = 0; i < part.width; ++i) {
        const uint16_t half = f32_to_f16(v[i]);
        std::memcpy(payload + 2 * i, &half, 2);
      }
    } else {
      const float steps = part.code == KVCode::kInt8 ? 127.0f : 7.0f;
      const float wanted = load_f32(&largest) / steps;
      if (magnitude_bits(wanted) > kLargestHalf) return false;
      *scales = f32_to_f16(wanted);
      const float scale = f16_to_f32(*scales++);
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      if (part.code == KVCode::kInt8)
        encode_int8(v, part.width, inverse, payload);
      else
        encode_int4(v, part.width, inverse, payload);
    }
    payload += part.payload_bytes();
  }
  return true;
}

inline void decode(const KVPart* parts, int64_t num_parts, const uint8_t* payload,
                   const uint16_t* scales, const float* centre, float* row) {
  for (int64_t p = 0; p < num_parts; ++p) {
    const KVPart& part = parts[p];
    float* v = row + part.begin;
    if (part.code == KVCode::kF16) {
      for (int64_t i = 0; i < part.width; ++i) v[i] = f16_to_f32(load_u16(payload + 2 * i));
    } else {
      const float scale = f16_to_f32(*scales++);
      if (part.code == KVCode::kInt8) {
        for (int64_t i = 0; i < part.width; ++i)
          v[i] = static_cast<float>(static_cast<int8_t>(payload[i])) * scale;
      } else {
        for (int64_t i = 0; i < part.width; ++i)
          v[i] = static_cast<float>((payload[i / 2] >> (i % 2 * 4) & 15) - 8) * scale;
      }
    }
    if (centre != nullptr)
      for (int64_t i = 0; i < part.width; ++i) v[i] = v[i] + centre[part.begin + i];
    payload += part.payload_bytes();
  }
}
