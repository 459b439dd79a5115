// Plain loops that the compiler turns into vectors; only float16 needs to be spelled out. Compiled
// without contraction of multiplications and additions, so that all instruction sets round alike.

// Adding it puts the nearest integer (even on a tie) into the low bits: 1.5 * 2^23.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kInfinityBits = 0x7f800000u, kLargestHalfBits = 0x477fe000u;  // 65504

inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

// Orders by magnitude; the sign is the last bit.
inline uint32_t magnitude_key(float v) {
  const uint32_t bits = bits_of(v);
  return bits << 1 | bits >> 31;
}

inline float to_float(float v) { return v; }
inline float to_float(uint16_t bits) { return bf16_to_f32(bits); }
inline void store(float v, float* to) { *to = v; }
inline void store(float v, uint16_t* to) { *to = f32_to_bf16(v); }

inline void to_halves(const float* v, int64_t n, uint8_t* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) {
    const uint16_t half = f32_to_f16(v[i]);
    std::memcpy(to + 2 * i, &half, 2);
  }
}

// v[n] and whether all are finite.
inline bool from_halves(const uint8_t* from, int64_t n, float* v) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(v + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                reinterpret_cast<const __m256i*>(from + 2 * i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(v + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                reinterpret_cast<const __m128i*>(from + 2 * i))));
#endif
  for (; i < n; ++i) v[i] = f16_to_f32(load_u16(from + 2 * i));
  uint32_t largest = 0;
  for (i = 0; i < n; ++i) {
    const uint32_t key = magnitude_key(v[i]);
    largest = key > largest ? key : largest;
  }
  return largest >> 1 < kInfinityBits;
}

// values[n] = the part, centred or not; the key of its largest magnitude.
template <bool kCentred, typename Element>
inline uint32_t load_part(const Element* row, const float* centre, int64_t n, float* values) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = kCentred ? to_float(row[i]) - centre[i] : to_float(row[i]);
    values[i] = v;
    const uint32_t key = magnitude_key(v);
    largest = key > largest ? key : largest;
  }
  return largest;
}

inline void encode_int8(const float* v, int64_t n, float inverse, uint8_t* payload) {
  for (int64_t i = 0; i < n; ++i)
    payload[i] = static_cast<uint8_t>(bits_of(v[i] * inverse + kRounder));
}

inline uint32_t int4_code(float v, float inverse) {
  constexpr float kLargestCode = kRounder + 15.0f;
  const float code = v * inverse + (kRounder + 8.0f);
  return bits_of(code < kLargestCode ? code : kLargestCode) & 15u;
}

inline void encode_int4(const float* v, int64_t n, float inverse, uint8_t* payload) {
  const int64_t half = n / 2, second = n - half;
  for (int64_t i = 0; i < half; ++i)
    payload[i] = static_cast<uint8_t>(int4_code(v[i], inverse) |
                                      int4_code(v[second + i], inverse) << 4);
  if (second > half)
    payload[half] = static_cast<uint8_t>(int4_code(v[half], inverse) | 8u << 4);
}

// magnitude / steps as float16 bits, rounded up; infinity when it is beyond float16.
inline uint16_t scale_of(uint32_t magnitude, float steps) {
  const float wanted = load_f32(&magnitude) / steps;
  const uint16_t half = f32_to_f16(wanted);
  const bool below = f16_to_f32(half) < wanted || (half == 0 && magnitude > 0);
  return static_cast<uint16_t>(half + (below ? 1 : 0));
}

template <typename Element>
inline bool encode_row(const KVRowCode& code, const Element* row, float* scratch, uint8_t* payload,
                       uint16_t* scales) {
  for (int64_t p = 0; p < code.num_parts; ++p) {
    const KVPart& part = code.parts[p];
    const bool centred = part.has_scale() && part.begin + part.width <= code.num_centred;
    const uint32_t key =
        centred ? load_part<true>(row + part.begin, code.centre + part.begin, part.width, scratch)
                : load_part<false>(row + part.begin, code.centre, part.width, scratch);
    const uint32_t largest = key >> 1;
    if (largest >= kInfinityBits) return false;
    if (!part.has_scale()) {
      if (largest > kLargestHalfBits) return false;
      to_halves(scratch, part.width, payload);
    } else {
      const bool int8 = part.code == KVCode::kInt8;
      uint16_t half = scale_of(largest, int8 ? 127.0f : 8.0f);
      if (half >= 0x7c00u) return false;
      if (!int8 && half > 0 && (key & 1u) == 0) half |= 0x8000u;
      *scales++ = half;
      const float inverse = half > 0 ? 1.0f / f16_to_f32(half) : 0.0f;
      if (int8)
        encode_int8(scratch, part.width, inverse, payload);
      else
        encode_int4(scratch, part.width, inverse, payload);
    }
    payload += part.payload_bytes();
  }
  return true;
}

template <bool kCentred, typename Element>
inline void decode_int8(const uint8_t* payload, int64_t n, float scale, const float* centre,
                        Element* row) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = static_cast<float>(static_cast<int8_t>(payload[i])) * scale;
    store(kCentred ? v + centre[i] : v, row + i);
  }
}

template <bool kCentred, typename Element>
inline void decode_int4(const uint8_t* payload, int64_t n, float scale, const float* centre,
                        Element* row) {
  const int64_t half = n / 2, second = n - half;
  for (int64_t i = 0; i < second; ++i) {
    const float v = static_cast<float>((payload[i] & 15) - 8) * scale;
    store(kCentred ? v + centre[i] : v, row + i);
  }
  for (int64_t i = 0; i < half; ++i) {
    const float v = static_cast<float>((payload[i] >> 4) - 8) * scale;
    store(kCentred ? v + centre[second + i] : v, row + second + i);
  }
}

template <typename Element>
inline bool decode_halves(const uint8_t* payload, int64_t n, Element* row) {
  constexpr int64_t kChunk = 128;
  float values[kChunk];
  bool finite = true;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = n - begin < kChunk ? n - begin : kChunk;
    finite &= from_halves(payload + 2 * begin, count, values);
    for (int64_t i = 0; i < count; ++i) store(values[i], row + begin + i);
  }
  return finite;
}

template <typename Element>
inline bool decode_row(const KVRowCode& code, const uint8_t* payload, const uint16_t* scales,
                       Element* row) {
  for (int64_t p = 0; p < code.num_parts; ++p) {
    const KVPart& part = code.parts[p];
    Element* to = row + part.begin;
    if (!part.has_scale()) {
      if (!decode_halves(payload, part.width, to)) return false;
    } else {
      if ((*scales & 0x7c00u) == 0x7c00u) return false;
      const float scale = f16_to_f32(*scales++);
      const bool centred = part.begin + part.width <= code.num_centred;
      const float* centre = centred ? code.centre + part.begin : nullptr;
      if (part.code == KVCode::kInt8)
        centred ? decode_int8<true>(payload, part.width, scale, centre, to)
                : decode_int8<false>(payload, part.width, scale, centre, to);
      else
        centred ? decode_int4<true>(payload, part.width, scale, centre, to)
                : decode_int4<false>(payload, part.width, scale, centre, to);
    }
    payload += part.payload_bytes();
  }
  return true;
}

inline bool encode(const KVRowCode& code, const void* row, float* scratch, uint8_t* payload,
                   uint16_t* scales) {
  return code.bf16
             ? encode_row(code, static_cast<const uint16_t*>(row), scratch, payload, scales)
             : encode_row(code, static_cast<const float*>(row), scratch, payload, scales);
}

inline bool decode(const KVRowCode& code, const uint8_t* payload, const uint16_t* scales,
                   void* row) {
  return code.bf16 ? decode_row(code, payload, scales, static_cast<uint16_t*>(row))
                   : decode_row(code, payload, scales, static_cast<float*>(row));
}

inline void add(const void* row, bool bf16, int64_t width, float* sums) {
  const auto* bits = static_cast<const uint16_t*>(row);
  const auto* floats = static_cast<const float*>(row);
  if (bf16)
    for (int64_t i = 0; i < width; ++i) sums[i] += bf16_to_f32(bits[i]);
  else
    for (int64_t i = 0; i < width; ++i) sums[i] += floats[i];
}
