// gemv with tdpbf16ps: a strip of 32 weight rows is decoded chunk by chunk into tiles in the first-
// level cache and meets all rows of x at once, so that 16 rows cost little more than one. A row of x
// is a column of the tiles: its bits depend on that row alone.
//
// The sums of a segment (columns that share a scale) are stored, scaled and added to float32 totals
// after the next chunk was decoded, so that nothing waits for the products.

constexpr int kGemvTiles = 4;  // of a chunk
constexpr int64_t kStripRows = kStripTiles * kTileRows;
constexpr int64_t kAheadBytes = 512;  // of a weight row: so many rows are too many for the hardware

struct GemvScratch {
  uint16_t weights[2][kStripTiles * kGemvTiles * kTileSize];  // of two chunks
  float sums[kGemvTiles][kStripTiles * kSums];           // [segment][output][row of x]
  float totals[kStripTiles * kSums];                     // [output][row of x]
  float grid_scales[kMaxColumns / kTileCols * kStripRows];  // [scale of a row][output]
  float unturned[kStripRows * kMaxColumns / kTileCols];  // [output][scale]
  int32_t outputs[kStripRows * kTileRows];               // of every element of totals
};
static_assert(sizeof(GemvScratch) + kMaxGemvRows * kMaxColumns * 4 <= kMatmulScratchBytes);

// Tile registers 0-1 and 5-6: sums of two segments, 2-3: weights, 4: x. Configured while this lives.
class GemvRegisters {
 public:
  explicit GemvRegisters(int num_rows) {
    TileConfig config;
    config.row_bytes[0] = config.row_bytes[1] = config.row_bytes[4] = config.row_bytes[5] =
        config.row_bytes[6] = static_cast<uint16_t>(4 * num_rows);
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC thinks that eight bytes are read
    _tile_loadconfig(&config);
  }
  ~GemvRegisters() { _tile_release(); }
  GemvRegisters(const GemvRegisters&) = delete;
  GemvRegisters& operator=(const GemvRegisters&) = delete;
};

// BF16 weights are tiles where they lie, and a whole row has one sum.
template <typename Tiles>
constexpr bool kInPlace = std::is_same_v<Tiles, TilesBF16>;

template <typename Tiles>
[[gnu::always_inline]] inline Cut gemv_cut(const MatrixView& w) {
  Cut cut = Tiles::cut(w);
  cut.max_tiles = kGemvTiles;
  return cut;
}

// One row of x, pair after pair as the decoder's order has them.
template <typename Tiles>
[[gnu::always_inline]] inline void pack_row(const Chunk& chunk, const float* x, uint16_t* out) {
  for (int s = 0; s < chunk.num_segments; ++s) {
    const Segment& segment = chunk.segments[s];
    for (int t = 0; t < segment.tiles; ++t) {
      alignas(64) uint16_t values[kTileCols];
      _mm512_store_si512(values, Tiles::arrange(round_inputs(x + segment.col + t * kTileCols,
                                                             segment.count - t * kTileCols)));
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
    const int64_t pairs = chunk.num_tiles * kTileRows;
    if (num_rows > 4) {  // all rows turned at once
      pack_inputs<Tiles>(chunk, x, num_rows, panel);
      for (int64_t pair = 0; pair < pairs; ++pair)
        std::memcpy(out + pair * 2 * num_rows, panel + pair * kTileCols,
                    static_cast<size_t>(4 * num_rows));
    } else {
      for (int r = 0; r < num_rows; ++r) {
        pack_row<Tiles>(chunk, x[r], panel);
        for (int64_t pair = 0; pair < pairs; ++pair)
          std::memcpy(out + (pair * num_rows + r) * 2, panel + pair * 2, 4);
      }
    }
    out += pairs * 2 * num_rows;
  }
}

// to[i][n] = from[n][i] for 32 rows n and i < count; `from` has whole lanes, its rows `stride` apart.
[[gnu::always_inline]] inline void turn_scales(const float* from, int64_t stride, int64_t count,
                                               float* to) {
  for (int64_t n = 0; n < kStripRows; n += kLanes)
    for (int64_t i = 0; i < count; i += kLanes) {
      Lanes tile[kLanes];
      for (int k = 0; k < kLanes; ++k) tile[k] = load(from + (n + k) * stride + i);
      transpose(tile);
      for (int64_t k = 0; k < kLanes && i + k < count; ++k)
        store(to + (i + k) * kStripRows + n, tile[k]);
    }
}

// The strip's scales from a grid, once for all chunks. Most strips lie in one row of the grid.
[[gnu::always_inline]] inline void load_grid_scales(const MatrixView& w, int64_t row, int64_t rows,
                                                    GemvScratch& scratch) {
  const int64_t count = num_scales(w), stride = (count + kLanes - 1) / kLanes * kLanes;
  if (w.grid_row(row) == w.grid_row(row + rows - 1) && w.group_index == nullptr) {
    convert_scales(w.scale_type, scale_row(w, row), count, 1.0f, scratch.unturned);
    for (int64_t i = 0; i < count; ++i) {
      const Lanes scale = broadcast(scratch.unturned[i]);
      store(scratch.grid_scales + i * kStripRows, scale);
      store(scratch.grid_scales + i * kStripRows + kLanes, scale);
    }
    return;
  }
  for (int64_t n = 0; n < rows; ++n)
    convert_scales(w.scale_type, scale_row(w, row + n), count, 1.0f,
                   scratch.unturned + n * stride);
  turn_scales(scratch.unturned, stride, count, scratch.grid_scales);
}

// Whether the chunk has no padding and begins at the edge of a unit.
template <typename Tiles>
[[gnu::always_inline]] inline bool is_whole(const Chunk& chunk) {
  int64_t cols = 0;
  for (int s = 0; s < chunk.num_segments; ++s) cols += chunk.segments[s].count;
  return chunk.num_tiles == kGemvTiles && cols == kGemvTiles * kTileCols &&
         chunk.segments[0].col % (Tiles::kUnit * kTileCols) == 0;
}

// Fetches what is kAheadBytes further on than the bytes [begin, begin + bytes) of 32 rows: of the same
// rows, or of those that are next.
struct RowsAhead {
  const uint8_t* rows;
  const uint8_t* next;
  int64_t stride, next_stride, row_bytes;

  [[gnu::always_inline]] RowsAhead from(int64_t begin) const {
    RowsAhead ahead = *this;
    const int64_t byte = begin + kAheadBytes;
    if (byte >= row_bytes) {
      ahead.rows = next + byte - row_bytes;
      ahead.stride = next_stride;
    } else {
      ahead.rows += byte;
    }
    return ahead;
  }
  [[gnu::always_inline]] void fetch(int64_t row, int64_t bytes) const {
    const uint8_t* p = rows + row * stride;
    for (int64_t byte = 0; byte < bytes; byte += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + byte), _MM_HINT_T0);
  }
};

// Such a chunk of 32 rows. Its shape is a constant here, so that the decoder is straight code.
template <typename Tiles>
[[gnu::always_inline]] inline void decode_whole(const Tiles& decoder, const MatrixView& w,
                                                int64_t row, const Chunk& chunk,
                                                const RowsAhead& rows_ahead, uint16_t* dst) {
  const Tiles tiles = decoder;  // its own copy: no store can change it, so it stays in registers
  const Unit unit = unit_of(w.format);
  const int64_t begin = chunk.segments[0].col / unit.cols * unit.bytes;
  Row stored{w.data + row * w.row_stride_bytes + begin, nullptr, w.scale_type};
  const RowsAhead ahead = rows_ahead.from(begin);
  const int64_t stride = w.row_stride_bytes;
  const int64_t bytes = kGemvTiles * kTileCols / unit.cols * unit.bytes;
  Chunk whole;
  whole.num_segments = 1;
  whole.num_tiles = kGemvTiles;
  whole.segments[0] = {0, kGemvTiles * kTileCols, 0, kGemvTiles, false};
  for (int64_t n = 0; n < kStripRows; ++n, stored.data += stride) {
    ahead.fetch(n, bytes);
    tiles.decode(stored, whole,
                 dst + n / kTileRows * (kGemvTiles * kTileSize) + n % kTileRows * kTileCols);
  }
}

// Where the tiles of a chunk of a strip lie: those of outputs 0-15, then of 16-31.
struct WeightTiles {
  const uint8_t* first;
  const uint8_t* second;
  int64_t row_bytes, tile_bytes;
};

// BF16 weights are tiles where they lie.
[[gnu::always_inline]] inline WeightTiles tiles_in_place(const MatrixView& w, int64_t row,
                                                         int64_t col, const RowsAhead& rows_ahead) {
  const uint8_t* p = w.data + row * w.row_stride_bytes + 2 * col;
  const RowsAhead ahead = rows_ahead.from(2 * col);
  for (int64_t n = 0; n < kStripRows; ++n) ahead.fetch(n, 2 * kGemvTiles * kTileCols);
  return {p, p + kTileRows * w.row_stride_bytes, w.row_stride_bytes, 2 * kTileCols};
}

// The sums of a segment in two tile registers; their numbers must be literals.
#define MOECHAT_STRIP_SUMS(Name, first_sums, second_sums)                                          \
  struct Name {                                                                                    \
    [[gnu::always_inline]] static void zero() {                                                    \
      _tile_zero(first_sums);                                                                      \
      _tile_zero(second_sums);                                                                     \
    }                                                                                              \
    [[gnu::always_inline]] static void add(const Segment& segment, const WeightTiles& weights,     \
                                           const uint16_t* x, int64_t num_rows) {                  \
      const int64_t x_tile = kTileSize / kTileRows * num_rows, stride = 4 * num_rows;              \
      for (int t = segment.tile; t < segment.tile + segment.tiles; ++t) {                          \
        _tile_loadd(4, x + t * x_tile, stride);                                                    \
        _tile_loadd(2, weights.first + t * weights.tile_bytes, weights.row_bytes);                 \
        _tile_loadd(3, weights.second + t * weights.tile_bytes, weights.row_bytes);                \
        _tile_dpbf16ps(first_sums, 2, 4);                                                          \
        _tile_dpbf16ps(second_sums, 3, 4);                                                         \
      }                                                                                            \
    }                                                                                              \
    [[gnu::always_inline]] static void store(float* sums, int64_t num_rows) {                      \
      _tile_stored(first_sums, sums, 4 * num_rows);                                                \
      _tile_stored(second_sums, sums + kTileRows * num_rows, 4 * num_rows);                        \
    }                                                                                              \
  }
MOECHAT_STRIP_SUMS(EvenSums, 0, 1);
MOECHAT_STRIP_SUMS(OddSums, 5, 6);
#undef MOECHAT_STRIP_SUMS

// totals += sums of every segment times the scales of its outputs, segment by segment. Both are
// [output][row of x] without gaps; `kSegments` 0: as many as the chunk has.
template <int kSegments>
[[gnu::always_inline]] inline void add_scaled(int segments, const float* scales, int64_t num_rows,
                                              GemvScratch& scratch) {
  const int count = kSegments > 0 ? kSegments : segments;
  const int64_t vectors = kStripRows * num_rows / kLanes;
  for (int64_t v = 0; v < vectors; ++v) {
    Lanes total = load(scratch.totals + v * kLanes);
    const __m512i index = _mm512_load_si512(scratch.outputs + v * kLanes);
    for (int s = 0; s < count; ++s) {
      const float* own = scales + s * kStripRows;
      const Lanes scale =
          num_rows == 1 ? load(own + v * kLanes)
                        : _mm512_permutex2var_ps(load(own), index, load(own + kLanes));
      total = fma(load(scratch.sums[s] + v * kLanes), scale, total);
    }
    store(scratch.totals + v * kLanes, total);
  }
}

template <typename Tiles>
void gemv_strip(const Tiles& tiles, const MatrixView& w, int64_t row, int64_t rows,
                const RowsAhead& ahead, const uint16_t* x, int64_t num_rows, float* const* y,
                GemvScratch& scratch) {
  std::memset(scratch.totals, 0, sizeof scratch.totals);
  if constexpr (!kInPlace<Tiles>) load_grid_scales(w, row, rows, scratch);
  Chunks chunks(w, gemv_cut<Tiles>(w));
  Chunk chunk[2];
  WeightTiles where[2];
  const auto decode = [&](int which) {
    const Chunk& next = chunk[which];
    uint16_t* dst = scratch.weights[which];
    const int64_t tile_rows = next.num_tiles * kTileSize;
    where[which] = {reinterpret_cast<const uint8_t*>(dst),
                    reinterpret_cast<const uint8_t*>(dst + tile_rows), 64, 2 * kTileSize};
    if (rows == kStripRows && is_whole<Tiles>(next)) {
      if constexpr (kInPlace<Tiles>)
        where[which] = tiles_in_place(w, row, next.segments[0].col, ahead);
      else
        decode_whole(tiles, w, row, next, ahead, dst);
    } else {
      for (int64_t n = 0; n < rows; ++n)
        tiles.decode({w.data + (row + n) * w.row_stride_bytes, nullptr, w.scale_type}, next,
                     dst + n / kTileRows * tile_rows + n % kTileRows * kTileCols);
    }
  };
  int which = 0;
  bool more = chunks.next(chunk[0]);
  if (more) decode(0);
  EvenSums::zero();
  while (more) {
    const Chunk& now = chunk[which];
    __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (int s = 0; s < now.num_segments; s += 2) {  // two at a time hide each other's latency
      if constexpr (!kInPlace<Tiles>) EvenSums::zero();
      EvenSums::add(now.segments[s], where[which], x, num_rows);
      if constexpr (!kInPlace<Tiles>) {
        const bool two = s + 1 < now.num_segments;
        if (two) {
          OddSums::zero();
          OddSums::add(now.segments[s + 1], where[which], x, num_rows);
        }
        EvenSums::store(scratch.sums[s], num_rows);
        if (two) OddSums::store(scratch.sums[s + 1], num_rows);
      }
    }
    more = chunks.next(chunk[which ^ 1]);
    if (more) decode(which ^ 1);
    if constexpr (!kInPlace<Tiles>) {
      const float* scales = scratch.grid_scales + now.first_scale * kStripRows;
      if (now.num_segments == 1)
        add_scaled<1>(1, scales, num_rows, scratch);
      else
        add_scaled<0>(now.num_segments, scales, num_rows, scratch);
    }
    x += now.num_tiles * kTileRows * 2 * num_rows;
    which ^= 1;
  }
  if constexpr (kInPlace<Tiles>) EvenSums::store(scratch.totals, num_rows);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t n = 0; n < rows; ++n) y[r][row + n] = scratch.totals[n * num_rows + r];
}

template <typename Tiles>
void gemv_tiles(const Tiles& tiles, const MatrixView& w, int64_t row_begin, int64_t row_end,
                const float* const* x, int num_rows, float* const* y, void* memory,
                KeptInputs* kept) {
  constexpr size_t kInputsBytes = kMaxGemvRows * kMaxColumns * 4;
  auto* inputs = static_cast<uint16_t*>(kept != nullptr ? kept->memory : memory);
  constexpr auto kernel = &gemv_tiles<Tiles>;
  if (kept == nullptr ||
      !kept->ready(w, Compute::kBF16, num_rows, reinterpret_cast<const void*>(kernel)))
    pack_gemv_inputs<Tiles>(w, x, num_rows, inputs);
  auto& scratch = *reinterpret_cast<GemvScratch*>(static_cast<uint8_t*>(memory) + kInputsBytes);
  for (int32_t n = 0, i = 0; n < kStripRows; ++n)
    for (int r = 0; r < num_rows; ++r) scratch.outputs[i++] = n;
  const GemvRegisters registers(num_rows);
  const int64_t stride = w.row_stride_bytes, row_bytes = w.cols * unit_of(w.format).bytes;
  for (int64_t row = row_begin; row < row_end; row += kStripRows) {
    const uint8_t* rows = w.data + row * stride;
    RowsAhead ahead{rows, rows + kStripRows * stride, stride, stride, row_bytes};
    if (row + kStripRows >= row_end && kept != nullptr && kept->next_rows != nullptr) {
      ahead.next = kept->next_rows;
      ahead.next_stride = kept->next_stride_bytes;
    }
    gemv_strip(tiles, w, row, row_end - row < kStripRows ? row_end - row : kStripRows, ahead, inputs,
               num_rows, y, scratch);
  }
}

// Decode class. False where another kernel has to do it, which depends on the weight alone: scales of
// 32 columns cost so much here that a single row of x would be slower.
bool gemv_dot(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int num_rows, float* const* y, void* memory, KeptInputs* kept) {
  const auto run = [&](auto tiles) {
    gemv_tiles(tiles, w, row_begin, row_end, x, num_rows, y, memory, kept);
    return true;
  };
  if (w.format == Format::kBF16 && w.col_step == 1) return run(TilesBF16{});
  if (w.format == Format::kFP8 && w.block_cols >= kGemvTiles * kTileCols) return run(TilesFP8{});
  return false;
}
