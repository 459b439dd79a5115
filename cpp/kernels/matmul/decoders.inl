// One decoder a format, for both float32 instruction sets: made of the lanes of lanes_<isa>.h, it
// turns a tile of kTile stored columns, consecutive and of one stored row, into lanes. Layouts are
// spelled out in weight_at.h.
//
// Decoder<format>: `tile(row, col, out)` with the first byte of the stored row and the tile's first
// column; `kScaling` says what else a value needs, and with kBlock `scale(row, col)` gives it. The
// NaN codes of FP8 need to become NaN only where kNaN.

constexpr int64_t kTile = 32;
constexpr int kTileLanes = kTile / kLanes;

enum class Scaling {
  kNone,       // lanes are values
  kGrid,       // times the grid's scale, times kGain
  kBlock,      // times the scale inside the block of kTile columns
  kSubBlocks,  // inside the block: `scales(block, dst)` unpacks them, `sub_tile` applies them
  kColumn,     // codes, to which each column's scale and zero point are applied
};

// Lane i's nibble stands at bit 4 i of an int32 of eight.
[[gnu::always_inline]] inline Ints low_first_shifts() {
  Ints shifts;
  for (int i = 0; i < kLanes; ++i) shifts[i] = static_cast<uint32_t>(i % 8 * 4);
  return shifts;
}
[[gnu::always_inline]] inline Ints nibbles(const uint8_t* p) {
  return words_of_nibbles(p) >> low_first_shifts();
}

template <Format kFormat>
struct Decoder;

template <>
struct Decoder<Format::kF32> {
  static constexpr Scaling kScaling = Scaling::kNone;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v)
      out[v] = from_bits(load_words(row + 4 * (col + v * kLanes)));
  }
};

template <>
struct Decoder<Format::kF16> {
  static constexpr Scaling kScaling = Scaling::kNone;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) out[v] = load_f16(row + 2 * (col + v * kLanes));
  }
};

template <>
struct Decoder<Format::kBF16> {
  static constexpr Scaling kScaling = Scaling::kNone;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v)
      out[v] = from_bits(load_halves(row + 2 * (col + v * kLanes)) << 16);
  }
};

template <>
struct Decoder<Format::kFP8> {
  static constexpr Scaling kScaling = Scaling::kGrid;
  static constexpr float kGain = 256.0f;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) out[v] = load_fp8<kNaN>(row + col + v * kLanes);
  }
};

template <>
struct Decoder<Format::kMXFP4> {
  static constexpr Scaling kScaling = Scaling::kGrid;
  static constexpr float kGain = 1.0f;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) out[v] = e2m1(nibbles(row + (col + v * kLanes) / 2));
  }
};

template <>
struct Decoder<Format::kInt4> {
  static constexpr Scaling kScaling = Scaling::kGrid;
  static constexpr float kGain = 1.0f;
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) out[v] = int4(nibbles(row + (col + v * kLanes) / 2));
  }
};

// Of kAWQ and kGPTQ, `codes` gives lane vector v of a tile of stored row n, whose bytes begin at p,
// and `zeros` those of kLanes columns.
template <>
struct Decoder<Format::kAWQ> {
  static constexpr Scaling kScaling = Scaling::kColumn;
  [[gnu::always_inline]] static Ints zeros(const uint8_t* p) {
    Ints shifts;
    for (int i = 0; i < kLanes; ++i) shifts[i] = static_cast<uint32_t>(i % 8 / 2 * 4 + i % 2 * 16);
    return (words_of_nibbles(p) >> shifts) & 15u;
  }
  [[gnu::always_inline]] static Ints codes(const uint8_t* p, int v, int64_t) {
    return zeros(p + v * kLanes / 2);
  }
};

template <>
struct Decoder<Format::kGPTQ> {
  static constexpr Scaling kScaling = Scaling::kColumn;
  [[gnu::always_inline]] static Ints zeros(const uint8_t* p) { return (nibbles(p) & 15u) + 1u; }
  [[gnu::always_inline]] static Ints codes(const uint8_t* p, int v, int64_t n) {
    return load_words(p + v * kLanes * 4) >> static_cast<uint32_t>(n % 8 * 4) & 15u;
  }
};

template <>
struct Decoder<Format::kQ8_0> {
  static constexpr Scaling kScaling = Scaling::kBlock;
  [[gnu::always_inline]] static const uint8_t* block(const uint8_t* row, int64_t col) {
    return row + col / 32 * 34;
  }
  [[gnu::always_inline]] static float scale(const uint8_t* row, int64_t col) {
    return f16_at(block(row, col));
  }
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
    const uint8_t* p = block(row, col) + 2;
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) out[v] = to_float(load_signed_bytes(p + v * kLanes));
  }
};

// The low nibbles of 16 bytes are the first half of a tile, the high ones the second.
template <typename Function>
[[gnu::always_inline]] inline void halves(const uint8_t* p, const Function& function, Lanes* out) {
#pragma GCC unroll 2
  for (int v = 0; v < kTileLanes / 2; ++v) {
    const Ints both = load_bytes(p + v * kLanes);
    out[v] = function(both & 15u, v);
    out[v + kTileLanes / 2] = function(both >> 4, v + kTileLanes / 2);
  }
}

template <>
struct Decoder<Format::kQ4_0> {
  static constexpr Scaling kScaling = Scaling::kBlock;
  [[gnu::always_inline]] static const uint8_t* block(const uint8_t* row, int64_t col) {
    return row + col / 32 * 18;
  }
  [[gnu::always_inline]] static float scale(const uint8_t* row, int64_t col) {
    return f16_at(block(row, col));
  }
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
    halves(block(row, col) + 2, [](Ints code, int) { return int4(code); }, out);
  }
};

template <>
struct Decoder<Format::kQ5_0> {
  static constexpr Scaling kScaling = Scaling::kBlock;
  [[gnu::always_inline]] static const uint8_t* block(const uint8_t* row, int64_t col) {
    return row + col / 32 * 22;
  }
  [[gnu::always_inline]] static float scale(const uint8_t* row, int64_t col) {
    return f16_at(block(row, col));
  }
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
    const uint8_t* p = block(row, col);
    const uint32_t fifth = load_u32(p + 2);
    Ints bit;
    for (int i = 0; i < kLanes; ++i) bit[i] = static_cast<uint32_t>(i);
    const auto value = [=](Ints code, int v) {
      const Ints upper = (Ints{} + fifth) >> (bit + static_cast<uint32_t>(v * kLanes)) << 4 & 16u;
      return to_float((code | upper) - 16u);
    };
    halves(p + 6, value, out);
  }
};

template <>
struct Decoder<Format::kMXFP4Block> {
  static constexpr Scaling kScaling = Scaling::kBlock;
  [[gnu::always_inline]] static const uint8_t* block(const uint8_t* row, int64_t col) {
    return row + col / 32 * 17;
  }
  [[gnu::always_inline]] static float scale(const uint8_t* row, int64_t col) {
    return e8m0_to_f32(*block(row, col));
  }
  template <bool kNaN>
  [[gnu::always_inline]] static void tile(const uint8_t* row, int64_t col, Lanes* out) {
    halves(block(row, col) + 1, [](Ints code, int) { return e2m1(code); }, out);
  }
};

// kQ4_K and kQ5_K: scales and negated minima of the eight sub-blocks of 32, each times the block's
// own, which is exact. kQ6_K: scales of the sixteen sub-blocks of 16. Two floats a tile.
constexpr int kBlockScales = 16;
[[gnu::always_inline]] inline void store_eight(uint64_t bytes, float factor, float* dst) {
  const __m256 values = _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes))));
  _mm256_storeu_ps(dst, _mm256_mul_ps(values, _mm256_set1_ps(factor)));
}
[[gnu::always_inline]] inline void k_scales(const uint8_t* block, float* dst) {
  const KCodes codes = k_codes(block);
  store_eight(codes.scales, f16_at(block), dst);
  store_eight(codes.minima, -f16_at(block + 2), dst + 8);
}

template <>
struct Decoder<Format::kQ4_K> {
  static constexpr Scaling kScaling = Scaling::kSubBlocks;
  [[gnu::always_inline]] static void scales(const uint8_t* block, float* dst) {
    k_scales(block, dst);
  }
  [[gnu::always_inline]] static void sub_tile(const uint8_t* block, int64_t half, int quarter,
                                              const float* scales, Lanes* out) {
    const int64_t j = half * 4 + quarter;
    const uint8_t* p = block + 16 + half * 64 + quarter / 2 * 32;
    const auto shift = static_cast<uint32_t>(quarter % 2 * 4);
    const Lanes scale = broadcast(scales[j]), minus_minimum = broadcast(scales[j + 8]);
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v)
      out[v] = fma(to_float(load_bytes(p + v * kLanes) >> shift & 15u), scale, minus_minimum);
  }
};

template <>
struct Decoder<Format::kQ5_K> {
  static constexpr Scaling kScaling = Scaling::kSubBlocks;
  [[gnu::always_inline]] static void scales(const uint8_t* block, float* dst) {
    k_scales(block, dst);
  }
  [[gnu::always_inline]] static void sub_tile(const uint8_t* block, int64_t half, int quarter,
                                              const float* scales, Lanes* out) {
    const int64_t j = half * 4 + quarter;
    const uint8_t* p = block + 48 + half * 64 + quarter / 2 * 32;
    const auto shift = static_cast<uint32_t>(quarter % 2 * 4);
    const Ints fifth_bit = Ints{} + (1u << j);
    const Lanes scale = broadcast(scales[j]), minus_minimum = broadcast(scales[j + 8]);
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      const Ints set = (load_bytes(block + 16 + v * kLanes) & fifth_bit) == fifth_bit;
      const Ints code = (load_bytes(p + v * kLanes) >> shift & 15u) | (set & 16u);
      out[v] = fma(to_float(code), scale, minus_minimum);
    }
  }
};

template <>
struct Decoder<Format::kQ6_K> {
  static constexpr Scaling kScaling = Scaling::kSubBlocks;
  [[gnu::always_inline]] static void scales(const uint8_t* block, float* dst) {
    const float d = f16_at(block + 208);
    store_eight(load_u32(block + 192) | uint64_t{load_u32(block + 196)} << 32, d, dst);
    store_eight(load_u32(block + 200) | uint64_t{load_u32(block + 204)} << 32, d, dst + 8);
  }
  [[gnu::always_inline]] static void sub_tile(const uint8_t* block, int64_t half, int quarter,
                                              const float* scales, Lanes* out) {
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    const auto low_shift = static_cast<uint32_t>(quarter / 2 * 4);
    const auto high_shift = static_cast<uint32_t>(quarter * 2);
    scales += half * 8 + quarter * 2;
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      const Ints upper = (load_bytes(high + v * kLanes) >> high_shift & 3u) << 4;
      const Ints code = (load_bytes(low + v * kLanes) >> low_shift & 15u) | upper;
      out[v] = mul(to_float(code - 32u), broadcast(scales[v * kLanes / 16]));
    }
  }
};

// Tile number `quarter` from `col` on, a multiple of four tiles, of a row of sub-blocks; `scales` are
// those of the whole block.
template <Format kFormat>
[[gnu::always_inline]] inline void sub_block_tile(const uint8_t* row, int64_t col, int quarter,
                                                  const float* scales, Lanes* out) {
  const uint8_t* block = row + col / 256 * unit_of(kFormat).bytes;
  Decoder<kFormat>::sub_tile(block, col / 128 % 2, quarter, scales, out);
}

// The first n <= kTile columns of a tile, zeros behind; nothing beyond the last stored byte of the
// row is read. Blocks of GGUF are whole tiles; not for kSubBlocks and kColumn.
template <Format kFormat, bool kNaN>
[[gnu::always_inline]] inline void decode_tile(const uint8_t* row, int64_t col, int64_t n,
                                               Lanes* out) {
  constexpr Unit kUnit = unit_of(kFormat);
  if (kUnit.cols >= kTile || n == kTile)
    return Decoder<kFormat>::template tile<kNaN>(row, col, out);
  if constexpr (kUnit.cols < kTile) {
    alignas(64) uint8_t bytes[kTile * kUnit.bytes / kUnit.cols] = {};
    const int64_t count = (n + kUnit.cols - 1) / kUnit.cols * kUnit.bytes;
    std::memcpy(bytes, row + col / kUnit.cols * kUnit.bytes, static_cast<size_t>(count));
    Decoder<kFormat>::template tile<kNaN>(bytes, 0, out);
    for (int v = 0; v < kTileLanes; ++v) out[v] = keep_first(out[v], n - v * kLanes);
  }
}
