// gemm at the speed of BF16 dot products. Weights are decoded once for 256 rows of x, into tiles in
// the caches; what scale a segment of columns shares is applied to its float32 sums.
//
//   rows of x at a time, outputs at a time    their float32 sums stay in the second-level cache
//   a few chunks of columns                   x packed for all of these outputs
//   strip of 32 outputs, chunk                decoded for all of these rows of x
//   Multiplier                                the instruction set's own part: block_<isa>.h

constexpr int64_t kStripTiles = 2;      // tiles of 16 outputs that are decoded together
constexpr int64_t kMaxPanels = 16;      // of 16 rows of x
constexpr int64_t kMaxSumTiles = 1024;  // of 16 outputs times 16 rows of x: 1 MiB
constexpr int64_t kChunks = 4;          // that x is packed for
constexpr int64_t kStepsAhead = 2;      // strips and chunks whose bytes are fetched ahead
constexpr int64_t kMaxParts = 2;

struct GemmScratch {
  float sums[kMaxSumTiles * kTileRows * kTileRows];  // [output tile][panel][16 outputs][16 rows]
  uint16_t inputs[kChunks * kMaxPanels * kMaxChunkTiles * kTileSize];      // [chunk][panel][tile]
  uint16_t weights[kStripTiles * kMaxChunkTiles * kMaxParts * kTileSize];  // [output tile][tile]
  float scales[2][kStripTiles * kTileRows * kScaleStride];  // in turn: [output][segment]
  BlockScratch block;
};
static_assert(sizeof(GemmScratch) <= kMatmulScratchBytes);

// Decodes `rows` weight rows from `row` on, a strip; zeros for the rows that are missing.
template <typename Tiles>
void decode_strip(const Tiles& tiles, const MatrixView& w, int64_t row, int64_t rows,
                  const Chunk& chunk, uint16_t* weights, float* scales) {
  const int64_t tile_size = chunk.num_tiles * Tiles::kParts * kTileSize;
  if (rows < kStripTiles * kTileRows) {
    std::memset(weights, 0, static_cast<size_t>(kStripTiles * tile_size) * 2);
    std::memset(scales, 0, sizeof(GemmScratch::scales) / 2);
  }
  const bool grid = has_row_scales(w.format);
  int64_t next = 0;  // the first row, from `row` on, with another row of the grid
  Row stored{w.data + row * w.row_stride_bytes, nullptr, w.scale_type};
  for (int64_t n = 0; n < rows; ++n, stored.data += w.row_stride_bytes) {
    const bool same_scales = grid && n < next;
    if (grid && !same_scales) {
      stored.scales = scale_row(w, row + n);
      next += w.block_rows - (n == 0 ? (row + w.row_origin) % w.block_rows : 0);
    }
    tiles.decode(stored, chunk, weights + n / kTileRows * tile_size + n % kTileRows * kTileCols);
    float* own = scales + n * kScaleStride;
    if (same_scales)
      store(own, load(own - kScaleStride));
    else
      tiles.scales(stored, chunk, own);
  }
}

// y = the sums, 16 outputs by 16 rows of x turned at a time.
void store_sums(const float* sums, int64_t begin, int64_t end, int64_t panels, int64_t num_rows,
                float* const* y) {
  for (int64_t n = begin; n < end; n += kTileRows)
    for (int64_t panel = 0; panel < panels; ++panel, sums += kTileRows * kTileRows) {
      Lanes lanes[kTileRows];
      for (int i = 0; i < kTileRows; ++i) lanes[i] = load(sums + i * kTileRows);
      transpose(lanes);
      for (int64_t r = panel * kTileRows; r < num_rows && r < (panel + 1) * kTileRows; ++r)
        store(y[r] + n, lanes[r % kTileRows], end - n);
    }
}

// The bytes of the rows [row, end), one strip at most, in a chunk; none behind the end.
Ahead look_ahead(const MatrixView& w, int64_t row, int64_t end, const Chunk& chunk) {
  const Unit unit = unit_of(w.format);
  const Segment& last = chunk.segments[chunk.num_segments - 1];
  const int64_t begin = chunk.segments[0].col, count = last.col + last.count - begin;
  Ahead ahead;
  ahead.row = w.data + row * w.row_stride_bytes + begin / unit.cols * unit.bytes;
  ahead.stride_bytes = w.row_stride_bytes;
  ahead.row_bytes = (count + unit.cols - 1) / unit.cols * unit.bytes;
  ahead.rows = end - row < kStripTiles * kTileRows ? end - row : kStripTiles * kTileRows;
  return ahead;
}

[[gnu::always_inline]] inline int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}
[[gnu::always_inline]] inline int64_t num_panels(int64_t num_rows) {
  return round_up((num_rows + kTileRows - 1) / kTileRows, kPanelsTogether);
}

// At most kMaxPanels * kTileRows rows, and as many outputs as their sums have room.
template <typename Tiles>
void gemm_block(const MatrixView& w, int64_t begin, int64_t end, const float* const* x,
                int64_t num_rows, float* const* y, GemmScratch& scratch) {
  const Tiles tiles;
  const int64_t panels = num_panels(num_rows), strip_rows = kStripTiles * kTileRows;
  const int64_t strips = (end - begin + strip_rows - 1) / strip_rows;
  const int64_t strip_sums = panels * strip_rows * kTileRows;
  std::memset(scratch.sums, 0, static_cast<size_t>(strips * strip_sums) * 4);
  Multiplier<Tiles::kParts> multiplier(scratch.block);
  Chunks cut(w, Tiles::cut(w));
  int turn = 0;  // of the scales
  for (bool more = true; more;) {
    Chunk chunks[kChunks];
    uint16_t* inputs[kChunks + 1] = {scratch.inputs};
    int count = 0;
    while (count < kChunks && (more = cut.next(chunks[count]))) {
      inputs[count + 1] = inputs[count] + panels * chunks[count].num_tiles * kTileSize;
      ++count;
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t row = panel * kTileRows;
      const int64_t rows = num_rows - row < kTileRows ? num_rows - row : kTileRows;
      for (int c = 0; c < count; ++c)
        pack_inputs<Tiles>(chunks[c], x + row, rows,
                           inputs[c] + panel * chunks[c].num_tiles * kTileSize);
    }
    for (int64_t step = 0; step < strips * count; ++step, turn ^= 1) {
      const int64_t strip = step / count, row = begin + strip * strip_rows;
      const Chunk& chunk = chunks[step % count];
      float* scales = scratch.scales[turn];
      decode_strip(tiles, w, row, end - row < strip_rows ? end - row : strip_rows, chunk,
                   scratch.weights, scales);
      const int64_t later = step + kStepsAhead;
      Ahead ahead = look_ahead(w, begin + later / count * strip_rows, end, chunks[later % count]);
      multiplier.multiply({chunk, scratch.weights, inputs[step % count], scales,
                           scratch.sums + strip * strip_sums, panels},
                          ahead);
    }
  }
  multiplier.finish();
  store_sums(scratch.sums, begin, end, panels, num_rows, y);
}

template <typename Tiles>
void gemm_tiles(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                int64_t num_rows, float* const* y, void* memory) {
  GemmScratch& scratch = *static_cast<GemmScratch*>(memory);
  for (int64_t r = 0; r < num_rows; r += kMaxPanels * kTileRows) {
    const int64_t rows =
        num_rows - r < kMaxPanels * kTileRows ? num_rows - r : kMaxPanels * kTileRows;
    const int64_t outputs = kMaxSumTiles / num_panels(rows) / kStripTiles * kStripTiles * kTileRows;
    for (int64_t begin = row_begin; begin < row_end; begin += outputs)
      gemm_block<Tiles>(w, begin, begin + outputs < row_end ? begin + outputs : row_end, x + r,
                        rows, y + r, scratch);
  }
}

// False where float32 has to do it: formats of more bits, and scales of very few columns.
bool gemm_bf16(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
               int64_t num_rows, float* const* y, void* scratch) {
  if (w.col_step != 1) return false;
  const auto run = [&](auto tiles) {
    gemm_tiles<decltype(tiles)>(w, row_begin, row_end, x, num_rows, y, scratch);
    return true;
  };
  switch (w.format) {
    case Format::kBF16: return run(TilesBF16{});
    case Format::kFP8: return w.block_cols >= kTileCols && run(TilesFP8{});
    case Format::kInt4: return w.block_cols >= kTileCols && run(TilesNibbles<kInt4Values>{});
    case Format::kMXFP4:
      if (scales_fit(w, row_begin, row_end)) return run(TilesScaledMXFP4{});
      return w.block_cols >= kTileCols && run(TilesNibbles<kE2M1Values>{});
    case Format::kQ8_0: return run(TilesQ8_0{});
    case Format::kQ4_0: return run(TilesNibbleBlocks<18, kInt4Values>{});
    case Format::kQ5_0: return run(TilesQ5_0{});
    case Format::kMXFP4Block: return run(TilesNibbleBlocks<17, kE2M1Values>{});
    case Format::kQ4_K: return run(TilesWithMinima<Format::kQ4_K>{});
    case Format::kQ5_K: return run(TilesWithMinima<Format::kQ5_K>{});
    case Format::kQ6_K: return run(TilesQ6_K{});
    case Format::kF32:
    case Format::kF16:
    case Format::kAWQ:
    case Format::kGPTQ: break;
  }
  return false;
}
