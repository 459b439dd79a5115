// Weights as tiles. One Tiles struct a format:
//
//   kUnit, position(i)   a unit of so many tiles is decoded together; its pair of columns i stands
//                        at pair position(i) of it
//   cut(w)               how the row is cut
//   row(...)             one row of the chunk: 32 BF16 at dst of every tile, kTileSize apart
//   scales(...)          one scale a segment of the chunk

[[gnu::always_inline]] inline void store_tile_row(uint16_t* dst, __m512i values) {
  _mm512_store_si512(dst, values);
}

// Scales in a grid.
struct GridScales {
  [[gnu::always_inline]] static void scales(const MatrixView& w, int64_t row, const Chunk& chunk,
                                            float* dst) {
    convert_scales(w.scale_type,
                   scale_row(w, row) + chunk.first_scale * scale_bytes(w.scale_type),
                   chunk.num_segments, 1.0f, dst);
  }
};

struct TilesFP8 : GridScales {
  static constexpr int kUnit = 2;
  static constexpr int position(int pair) {  // DecoderFP8's order: pieces of four pairs
    return pair / 4 % 2 * 16 + pair / 8 * 4 + pair % 4;
  }
  static Cut cut(const MatrixView& w) { return {8, kUnit, w.block_cols, false}; }

  const DecoderFP8 decode;
  [[gnu::always_inline]] void row(const MatrixView& w, int64_t row, const Chunk& chunk,
                                  uint16_t* dst) const {
    const uint8_t* codes = w.data + row * w.row_stride_bytes;
    for (int s = 0; s < chunk.num_segments; ++s) {
      const Segment& segment = chunk.segments[s];
      for (int t = 0; t < segment.tiles; t += kUnit) {
        __m512i out[kUnit];
        decode(codes + segment.col + t * kTileCols, segment.count - t * kTileCols, out);
        for (int i = 0; i < kUnit; ++i)
          store_tile_row(dst + (segment.tile + t + i) * kTileSize, out[i]);
      }
    }
  }
};

struct TilesBF16 {
  static constexpr int kUnit = 1;
  static constexpr int position(int pair) { return pair; }
  static Cut cut(const MatrixView&) { return {8, kUnit, 0, false}; }
  [[gnu::always_inline]] static void scales(const MatrixView&, int64_t, const Chunk& chunk,
                                            float* dst) {
    for (int s = 0; s < chunk.num_segments; ++s) dst[s] = 1.0f;
  }
  [[gnu::always_inline]] static void row(const MatrixView& w, int64_t row, const Chunk& chunk,
                                         uint16_t* dst) {
    for (int s = 0; s < chunk.num_segments; ++s) {
      const Segment& segment = chunk.segments[s];
      const uint8_t* p = w.data + row * w.row_stride_bytes + 2 * segment.col;
      for (int t = 0; t < segment.tiles; ++t, p += 2 * kTileCols) {
        const int64_t left = segment.count - t * kTileCols;
        const __mmask32 mask = static_cast<__mmask32>(first64(left < 32 ? left : 32));
        store_tile_row(dst + (segment.tile + t) * kTileSize, _mm512_maskz_loadu_epi16(mask, p));
      }
    }
  }
};
