// Activations as tiles: 16 rows of x, rounded to BF16, pair of columns by pair of columns.

// The first n of 32 floats as BF16, zeros behind.
[[gnu::always_inline]] inline __m512i round_inputs(const float* p, int64_t n) {
  return (__m512i)_mm512_cvtne2ps_pbh(load_some(p + kLanes, n - kLanes), load_some(p, n));
}

constexpr int64_t kAheadFloats = 128;  // of every row, brought into the first cache

// tile[position(i)] = pair i of the 16 rows; `n` columns from x[r] + col on, zeros behind. Where x
// has fewer than 16 rows, zeros too.
template <typename Position>
[[gnu::always_inline]] inline void pack_tile(const float* const* x, int64_t rows, int64_t col,
                                             int64_t n, const Position& position, uint16_t* tile) {
  Lanes pairs[kTileRows];
  for (int64_t r = 0; r < kTileRows; ++r) {
    pairs[r] = zero();
    if (r >= rows) continue;
    pairs[r] = (Lanes)round_inputs(x[r] + col, n);
    _mm_prefetch(reinterpret_cast<const char*>(x[r] + col + kAheadFloats), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(x[r] + col + kAheadFloats + 16), _MM_HINT_T0);
  }
  transpose(pairs);
  for (int i = 0; i < kTileRows; ++i)
    store(reinterpret_cast<float*>(tile + position(i) * kTileCols), pairs[i]);
}

// The tiles of one chunk for one panel, that is 16 rows of x.
template <typename Tiles>
void pack_inputs(const Chunk& chunk, const float* const* x, int64_t rows, uint16_t* panel) {
  for (int s = 0; s < chunk.num_segments; ++s) {
    const Segment& segment = chunk.segments[s];
    for (int t = 0; t < segment.tiles; ++t) {
      uint16_t* unit = panel + (segment.tile + t / Tiles::kUnit * Tiles::kUnit) * kTileSize;
      const int first = t % Tiles::kUnit * static_cast<int>(kTileRows);
      pack_tile(x, rows, segment.col + t * kTileCols, segment.count - t * kTileCols,
                [first](int i) { return Tiles::position(first + i); }, unit);
    }
  }
}
