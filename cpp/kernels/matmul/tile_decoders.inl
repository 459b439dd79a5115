// Weights as tiles. One Tiles struct a format:
//
//   kUnit, position(i)   so many tiles are decoded together; their pair of columns i stands at pair
//                        position(i) of them
//   arrange(columns)     the order of the 32 columns of a tile; before position()
//   kParts               BF16 numbers whose sum a weight is: so many tiles of weights a tile of x
//   cut(w)               how the row is cut
//   decode(...)          one row of a chunk: 32 BF16 at dst of every tile, kTileSize apart
//   scales(...)          one scale a segment of the chunk
//
// No byte behind a row's last one is read. What stands in a tile behind a segment's last column is
// finite: it meets zeros.

// A stored row, and its first scale in a grid.
struct Row {
  const uint8_t* data;
  const uint8_t* scales;
  ScaleType scale_type;
};

struct PlainTiles {
  static constexpr int kUnit = 1, kParts = 1;
  static constexpr int position(int pair) { return pair; }
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) { return columns; }
};

// function(tile of the chunk, first column, number of columns) for every tile of columns.
template <typename Function>
[[gnu::always_inline]] inline void for_tiles(const Chunk& chunk, const Function& function) {
  if (chunk.whole) {
    const int64_t col = chunk.segments[0].col;
    for (int t = 0; t < chunk.num_tiles; ++t) function(t, col + t * kTileCols, kTileCols);
    return;
  }
  for (int s = 0; s < chunk.num_segments; ++s) {
    const Segment& segment = chunk.segments[s];
    if (segment.sums) continue;
    for (int t = 0; t < segment.tiles; ++t) {
      const int64_t left = segment.count - t * kTileCols;
      function(segment.tile + t, segment.col + t * kTileCols, left < kTileCols ? left : kTileCols);
    }
  }
}

[[gnu::always_inline]] inline __mmask32 first32(int64_t n) {
  return static_cast<__mmask32>(first64(n));
}

// 32 signed words as BF16; exact up to 8 bits.
[[gnu::always_inline]] inline __m512i words_to_bf16(__m512i words) {
  const auto half = [](__m256i part) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(part)); };
  return (__m512i)_mm512_cvtne2ps_pbh(half(_mm512_extracti64x4_epi64(words, 1)),
                                      half(_mm512_castsi512_si256(words)));
}

// n <= kLanes scales as float32, exactly.
[[gnu::always_inline]] inline Lanes load_scales(ScaleType type, const uint8_t* p, int64_t n) {
  const auto halves = [=] { return _mm256_maskz_loadu_epi16(first(n), p); };
  switch (type) {
    case ScaleType::kF32: return load(reinterpret_cast<const float*>(p), n);
    case ScaleType::kBF16: return from_bits((Ints)_mm512_cvtepu16_epi32(halves()) << 16);
    case ScaleType::kF16: return _mm512_cvtph_ps(halves());
    case ScaleType::kE8M0: break;
  }
  const Ints code = (Ints)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p));
  const Ints bits = code == 0u ? Ints{} + 0x00400000u : code << 23;  // 2^-127 is denormal
  return from_bits(code == 255u ? Ints{} + 0x7fc00000u : bits);
}

// Scales in a grid.
struct GridScales {
  [[gnu::always_inline]] static void scales(const Row& row, const Chunk& chunk, float* dst) {
    store(dst, load_scales(row.scale_type,
                           row.scales + chunk.first_scale * scale_bytes(row.scale_type),
                           chunk.num_segments));
  }
};

// None: the whole chunk is one segment.
struct NoScales {
  [[gnu::always_inline]] static void scales(const Row&, const Chunk&, float* dst) {
    *dst = 1.0f;
  }
};

struct TilesFP8 : GridScales {
  static constexpr int kUnit = 2, kParts = 1;
  static constexpr int position(int pair) {  // DecoderFP8's order: pieces of four pairs
    return pair / 4 % 2 * 16 + pair / 8 * 4 + pair % 4;
  }
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) { return columns; }
  static Cut cut(const MatrixView& w) { return {8, kUnit, w.block_cols, false}; }

  const DecoderFP8 tables;
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    const DecoderFP8 decoder = tables;  // in registers
    if (chunk.whole) {
      const uint8_t* codes = row.data + chunk.segments[0].col;
      for (int t = 0; t < chunk.num_tiles; t += kUnit, codes += kUnit * kTileCols) {
        __m512i out[kUnit];
        decoder(codes, kUnit * kTileCols, out);
        _mm512_store_si512(dst + t * kTileSize, out[0]);
        _mm512_store_si512(dst + (t + 1) * kTileSize, out[1]);
      }
      return;
    }
    for (int s = 0; s < chunk.num_segments; ++s) {
      const Segment& segment = chunk.segments[s];
      for (int t = 0; t < segment.tiles; t += kUnit) {
        __m512i out[kUnit];
        decoder(row.data + segment.col + t * kTileCols, segment.count - t * kTileCols, out);
        for (int i = 0; i < kUnit; ++i)
          _mm512_store_si512(dst + (segment.tile + t + i) * kTileSize, out[i]);
      }
    }
  }
};

struct TilesBF16 : PlainTiles, NoScales {
  static Cut cut(const MatrixView&) { return {8, kUnit, 0, false}; }
  [[gnu::always_inline]] static void decode(const Row& row, const Chunk& chunk, uint16_t* dst) {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t n) {
      _mm512_store_si512(dst + tile * kTileSize,
                         _mm512_maskz_loadu_epi16(first32(n), row.data + 2 * col));
    });
  }
};

// GGUF blocks of 32 that begin with their scale.
template <int64_t kBytes>
struct BlockTiles : PlainTiles {
  static Cut cut(const MatrixView&) { return {8, kUnit, kTileCols, false}; }
  [[gnu::always_inline]] static const uint8_t* block(const Row& row, int64_t col) {
    return row.data + col / kTileCols * kBytes;
  }
  [[gnu::always_inline]] static void scales(const Row& row, const Chunk& chunk, float* dst) {
    const uint8_t* p = block(row, chunk.segments[0].col);
    for (int s = 0; s < chunk.num_segments; ++s, p += kBytes)
      dst[s] = kBytes == 17 ? e8m0_to_f32(*p) : f16_at(p);
  }
};

struct TilesQ8_0 : BlockTiles<34> {
  [[gnu::always_inline]] static void decode(const Row& row, const Chunk& chunk, uint16_t* dst) {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t) {
      const auto* codes = reinterpret_cast<const __m256i*>(block(row, col) + 2);
      _mm512_store_si512(dst + tile * kTileSize,
                         words_to_bf16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(codes))));
    });
  }
};
