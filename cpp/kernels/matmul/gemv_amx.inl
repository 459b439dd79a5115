// gemv with tdpbf16ps: a strip of 32 weight rows is decoded chunk by chunk into tiles in the first-
// level cache and meets all rows of x at once, so that 16 rows cost little more than one. A row of x
// is a column of the tiles: its bits depend on that row alone.
//
// The sums of a segment (columns that share a scale) are stored, scaled and added to float32 totals
// while the next chunk is decoded.

constexpr int kGemvTiles = 4;  // of a chunk, about: 128 columns
constexpr int kGemvAhead = 4;  // chunks
constexpr int64_t kStripRows = kStripTiles * kTileRows;

struct GemvScratch {
  uint16_t weights[2][kStripTiles * kMaxChunkTiles * kTileSize];  // of this chunk and the next
  float scales[2][kStripRows * kScaleStride];
  float sums[kStripTiles * kSums];
  float totals[kStripTiles * kSums];  // [output][row of x]
  float row_scales[kStripRows * kMaxColumns / kTileCols];  // of whole rows, where they are a grid
};

// Scales of the strip's rows from a grid, once for all chunks; rows of one block share them.
[[gnu::always_inline]] inline void convert_row_scales(const MatrixView& w, int64_t row,
                                                      int64_t rows, int64_t stride, float* dst) {
  for (int64_t n = 0; n < rows; ++n) {
    if (n > 0 && w.grid_row(row + n) == w.grid_row(row + n - 1))
      std::memcpy(dst + n * stride, dst + (n - 1) * stride, static_cast<size_t>(stride) * 4);
    else
      convert_scales(w.scale_type, scale_row(w, row + n), num_scales(w), 1.0f, dst + n * stride);
  }
}

// Tile registers 0-1: sums, 2-3: weights, 4: x. Configured while this lives.
class GemvRegisters {
 public:
  explicit GemvRegisters(int num_rows) {
    TileConfig config;
    config.row_bytes[0] = config.row_bytes[1] = config.row_bytes[4] =
        static_cast<uint16_t>(4 * num_rows);
    _tile_loadconfig(&config);
  }
  ~GemvRegisters() { _tile_release(); }
  GemvRegisters(const GemvRegisters&) = delete;
  GemvRegisters& operator=(const GemvRegisters&) = delete;
};

// The cut of a format with shorter chunks.
template <typename Tiles>
[[gnu::always_inline]] inline Cut gemv_cut(const MatrixView& w) {
  Cut cut = Tiles::cut(w);
  if (!cut.sums && cut.max_tiles > kGemvTiles) cut.max_tiles = kGemvTiles;
  return cut;
}

// One row of x, pair after pair as the decoder's order has them.
template <typename Tiles>
[[gnu::always_inline]] inline void pack_row(const Chunk& chunk, const float* x, uint16_t* out) {
  for (int s = 0; s < chunk.num_segments; ++s) {
    const Segment& segment = chunk.segments[s];
    for (int t = 0; t < segment.tiles; ++t) {
      alignas(64) uint16_t values[kTileCols];
      _mm512_store_si512(values, round_inputs(x + segment.col + t * kTileCols,
                                              segment.count - t * kTileCols));
      uint16_t* unit = out + (segment.tile + t / Tiles::kUnit * Tiles::kUnit) * kTileCols;
      const int first = t % Tiles::kUnit * static_cast<int>(kTileRows);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i)
        std::memcpy(unit + 2 * Tiles::position(first + i), values + 2 * i, 4);
    }
  }
}

// x as tiles of num_rows columns, chunk after chunk: [tile][16 pairs][num_rows][2].
template <typename Tiles>
void pack_gemv_inputs(const MatrixView& w, const float* const* x, int num_rows, uint16_t* out) {
  alignas(64) uint16_t panel[kMaxChunkTiles * kTileSize];
  Chunk chunk;
  for (Chunks chunks(w, gemv_cut<Tiles>(w)); chunks.next(chunk);) {
    if (num_rows > 4) {  // all rows turned at once
      pack_inputs<Tiles>(chunk, x, num_rows, panel);
      for (int64_t pair = 0; pair < chunk.num_tiles * kTileRows; ++pair)
        std::memcpy(out + pair * 2 * num_rows, panel + pair * kTileCols,
                    static_cast<size_t>(4 * num_rows));
    } else {
      for (int r = 0; r < num_rows; ++r) {
        pack_row<Tiles>(chunk, x[r], panel);
        for (int64_t pair = 0; pair < chunk.num_tiles * kTileRows; ++pair)
          std::memcpy(out + (pair * num_rows + r) * 2, panel + pair * 2, 4);
      }
    }
    out += chunk.num_tiles * kTileRows * 2 * num_rows;
  }
}

// Whether the chunk is kGemvTiles tiles without padding, from the edge of a unit on.
template <typename Tiles>
[[gnu::always_inline]] inline bool is_whole(const Chunk& chunk) {
  int64_t cols = 0;
  for (int s = 0; s < chunk.num_segments; ++s) cols += chunk.segments[s].count;
  return chunk.num_tiles == kGemvTiles && cols == kGemvTiles * kTileCols &&
         chunk.segments[0].col % (Tiles::kUnit * kTileCols) == 0;
}

// Such a chunk of a strip of 32 rows, from column `col` on. The rows' next chunks are fetched ahead:
// so many streams are too many for the hardware.
template <typename Tiles>
[[gnu::always_inline]] inline void decode_whole(const Tiles& decoder, const MatrixView& w,
                                                int64_t row, int64_t col, uint16_t* dst) {
  const Tiles tiles = decoder;  // its own copy: no store can change it, so it stays in registers
  const int64_t stride = w.row_stride_bytes;
  constexpr int kUnits = kGemvTiles / Tiles::kUnit;
  constexpr int64_t kChunkBytes = kUnits * Tiles::kUnitBytes;
  const uint8_t* p =
      w.data + row * w.row_stride_bytes + col / (Tiles::kUnit * kTileCols) * Tiles::kUnitBytes;
  for (int64_t n = 0; n < kStripRows; ++n, p += stride) {
    for (int64_t line = 0; line < kChunkBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + kGemvAhead * kChunkBytes + line), _MM_HINT_T0);
    uint16_t* tile_row =
        dst + n / kTileRows * (kGemvTiles * kTileSize) + n % kTileRows * kTileCols;
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; ++u)
      tiles.unit(p + u * Tiles::kUnitBytes, tile_row + u * Tiles::kUnit * kTileSize);
  }
}

// Where the tiles of a chunk of a strip lie: tile t of outputs 0-15, then 16-31, `row_bytes` apart.
struct WeightTiles {
  const uint8_t* first;
  const uint8_t* second;
  int64_t row_bytes, tile_bytes;
};

// BF16 weights are tiles where they lie; their next lines are fetched ahead.
[[gnu::always_inline]] inline WeightTiles tiles_in_place(const MatrixView& w, int64_t row,
                                                         int64_t col) {
  const uint8_t* p = w.data + row * w.row_stride_bytes + 2 * col;
  for (int64_t n = 0; n < kStripRows; ++n)
    for (int64_t line = 0; line < 2 * kGemvTiles * kTileCols; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + n * w.row_stride_bytes + 1024 + line),
                   _MM_HINT_T0);
  return {p, p + kTileRows * w.row_stride_bytes, w.row_stride_bytes, 2 * kTileCols};
}

[[gnu::always_inline]] inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
}

[[gnu::always_inline]] inline void add_segment(const Segment& segment, const WeightTiles& weights,
                                               const uint16_t* x, int64_t num_rows) {
  const int64_t x_tile = kTileSize / kTileRows * num_rows, stride = 4 * num_rows;
  for (int t = segment.tile; t < segment.tile + segment.tiles; ++t) {
    _tile_loadd(4, x + t * x_tile, stride);
    _tile_loadd(2, weights.first + t * weights.tile_bytes, weights.row_bytes);
    _tile_loadd(3, weights.second + t * weights.tile_bytes, weights.row_bytes);
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 3, 4);
  }
}

[[gnu::always_inline]] inline void store_sums_of_strip(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSums, 64);
}

template <typename Tiles>
void gemv_strip(const Tiles& tiles, const MatrixView& w, int64_t row, int64_t rows,
                const uint16_t* x, int64_t num_rows, float* const* y, GemvScratch& scratch) {
  std::memset(scratch.totals, 0, sizeof scratch.totals);
  constexpr bool kScaled = !std::is_same_v<Tiles, TilesBF16>;  // else one sum for the whole row
  constexpr bool kGrid = std::is_base_of_v<GridScales, Tiles>;
  const int64_t grid_stride = kGrid ? (num_scales(w) + kLanes - 1) / kLanes * kLanes : 0;
  if constexpr (kGrid) convert_row_scales(w, row, rows, grid_stride, scratch.row_scales);
  Chunks chunks(w, gemv_cut<Tiles>(w));
  Chunk chunk[2];
  WeightTiles where[2];
  const auto decode = [&](int which) {
    uint16_t* dst = scratch.weights[which];
    const int64_t tile_rows = chunk[which].num_tiles * kTileSize;
    where[which] = {reinterpret_cast<const uint8_t*>(dst),
                    reinterpret_cast<const uint8_t*>(dst + tile_rows), 64, 2 * kTileSize};
    if constexpr (kScaled && !kGrid)
      for (int64_t n = 0; n < rows; ++n)
        tiles.scales(w, row + n, chunk[which], scratch.scales[which] + n * kScaleStride);
    if (rows == kStripRows && is_whole<Tiles>(chunk[which])) {
      const int64_t col = chunk[which].segments[0].col;
      if constexpr (std::is_same_v<Tiles, TilesBF16>)
        where[which] = tiles_in_place(w, row, col);
      else
        decode_whole(tiles, w, row, col, dst);
      return;
    }
    for (int64_t n = 0; n < rows; ++n)
      tiles.row(w, row + n, chunk[which],
                dst + n / kTileRows * tile_rows + n % kTileRows * kTileCols);
  };
  int which = 0;
  bool first = true, more = chunks.next(chunk[0]);
  if (more) decode(0);
  while (more) {
    const Chunk& now = chunk[which];
    const WeightTiles weights = where[which];
    const float* scales =
        kGrid ? scratch.row_scales + now.first_scale : scratch.scales[which];
    const int64_t scale_stride = kGrid ? grid_stride : kScaleStride;
    more = chunks.next(chunk[which ^ 1]);
    for (int s = 0; s < now.num_segments; ++s) {
      __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
      if (kScaled || (first && s == 0)) zero_sums();
      add_segment(now.segments[s], weights, x, num_rows);
      if constexpr (kScaled) store_sums_of_strip(scratch.sums);
      if (more && s == 0) decode(which ^ 1);
      if constexpr (kScaled)
        for (int n = 0; n < kStripRows; ++n) {
          float* total = scratch.totals + n * kTileRows;
          const Lanes factor = broadcast(scales[n * scale_stride + s]);
          store(total, fma(load(scratch.sums + n * kTileRows), factor, load(total)));
        }
    }
    first = false;
    x += now.num_tiles * kTileRows * 2 * num_rows;
    which ^= 1;
  }
  if constexpr (!kScaled) store_sums_of_strip(scratch.totals);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t n = 0; n < rows; ++n) y[r][row + n] = scratch.totals[n * kTileRows + r];
}

// False where another kernel has to do it.
bool gemv_tiles(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                int num_rows, float* const* y, void* memory, KeptInputs* kept) {
  if (w.col_step != 1) return false;
  constexpr size_t kInputsBytes = (kMaxGemvRows + 1) * kMaxColumns * 4;
  const auto run = [&](auto tiles) {
    using Tiles = decltype(tiles);
    auto* inputs = static_cast<uint16_t*>(kept != nullptr ? kept->memory : memory);
    if (kept == nullptr ||
        !kept->ready(w, Compute::kBF16, num_rows, reinterpret_cast<const void*>(&gemv_tiles)))
      pack_gemv_inputs<Tiles>(w, x, num_rows, inputs);
    auto& scratch =
        *reinterpret_cast<GemvScratch*>(static_cast<uint8_t*>(memory) + kInputsBytes);
    const GemvRegisters registers(num_rows);
    for (int64_t row = row_begin; row < row_end; row += kStripRows)
      gemv_strip(tiles, w, row,
                 row_end - row < kStripRows ? row_end - row : kStripRows, inputs, num_rows, y,
                 scratch);
    return true;
  };
  switch (w.format) {
    case Format::kBF16: return run(TilesBF16{});
    case Format::kFP8: return w.block_cols >= kTileCols && run(TilesFP8{});
    default: return false;
  }
}
