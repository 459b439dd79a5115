// Activations as tiles: 16 rows of x, rounded to BF16, pair of columns by pair of columns.

// The first n of 32 floats as BF16, zeros behind.
[[gnu::always_inline]] inline __m512i round_inputs(const float* p, int64_t n) {
  return (__m512i)_mm512_cvtne2ps_pbh(load_some(p + kLanes, n - kLanes), load_some(p, n));
}

constexpr int64_t kAheadFloats = 128;  // of every row, brought into the first cache

// tile[position(i)] = pair i of the 16 rows; `n` columns from x[r] + col on, zeros behind. Where x
// has fewer than 16 rows, zeros too.
template <typename Tiles, bool kWhole, typename Position>
[[gnu::always_inline]] inline void pack_tile(const float* const* x, int64_t rows, int64_t col,
                                             int64_t n, const Position& position, uint16_t* tile) {
  Lanes pairs[kTileRows];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kTileRows; ++r) {
    if (!kWhole && r >= rows) {
      pairs[r] = zero();
      continue;
    }
    const float* p = x[r] + col;
    pairs[r] = (Lanes)Tiles::arrange(round_inputs(p, kWhole ? kTileCols : n));
    _mm_prefetch(reinterpret_cast<const char*>(p + kAheadFloats), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p + kAheadFloats + 16), _MM_HINT_T0);
  }
  transpose(pairs);
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i)
    store(reinterpret_cast<float*>(tile + position(i) * kTileCols), pairs[i]);
}

// The sums of eight tiles over their 32 columns, as three BF16 numbers each: columns 0 to 7, 8 to
// 15 and 16 to 23 of the tile; zeros behind.
[[gnu::always_inline]] inline void pack_sums(const uint16_t* tiles, uint16_t* sums) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int pair = 0; pair < 4; ++pair) {
    Lanes rest[2];
    for (int i = 0; i < 2; ++i) {
      rest[i] = zero();
      const uint16_t* tile = tiles + (pair * 2 + i) * kTileSize;
      for (int row = 0; row < kTileRows; ++row)
        rest[i] = _mm512_dpbf16_ps(
            rest[i], (__m512bh)_mm512_load_si512(tile + row * kTileCols), ones);
    }
    for (int part = 0; part < 3; ++part) {
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(rest[0])), 16);
      const __m512i high = _mm512_castps_si512(round_bf16(rest[1]));
      const __m512i both = _mm512_mask_mov_epi16(low, 0xaaaaaaaau, high);
      _mm512_store_si512(sums + (part * 4 + pair) * kTileCols, both);
      for (Lanes& value : rest) value = sub(value, round_bf16(value));
    }
    _mm512_store_si512(sums + (12 + pair) * kTileCols, _mm512_setzero_si512());
  }
}

// The tiles of one chunk for one panel, that is 16 rows of x.
template <typename Tiles>
void pack_inputs(const Chunk& chunk, const float* const* x, int64_t rows, uint16_t* panel) {
  for (int s = 0; s < chunk.num_segments; ++s) {
    const Segment& segment = chunk.segments[s];
    if (segment.sums) {
      pack_sums(panel + (segment.tile - 8) * kTileSize, panel + segment.tile * kTileSize);
      continue;
    }
    for (int t = 0; t < segment.tiles; ++t) {
      uint16_t* unit = panel + (segment.tile + t / Tiles::kUnit * Tiles::kUnit) * kTileSize;
      const int first = t % Tiles::kUnit * static_cast<int>(kTileRows);
      const auto position = [first](int i) { return Tiles::position(first + i); };
      const int64_t col = segment.col + t * kTileCols, left = segment.count - t * kTileCols;
      if (rows == kTileRows && left >= kTileCols)
        pack_tile<Tiles, true>(x, rows, col, left, position, unit);
      else
        pack_tile<Tiles, false>(x, rows, col, left, position, unit);
    }
  }
}
