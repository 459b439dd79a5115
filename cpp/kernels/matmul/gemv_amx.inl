// gemv of BF16 weights with tdpbf16ps, for 1 to 16 rows at the cost of one: rows of a weight are tiles
// where they lie, and all rows of x are the columns of one tile. A row's bits depend on that row of x
// alone. Weights that must be decoded first are slower this way than with vdpbf16ps when x is one row.

constexpr int kGemvTiles = 4;  // of a chunk: 128 columns
constexpr int64_t kStripRows = kStripTiles * kTileRows;
constexpr int64_t kAheadBytes = 1024;  // of a weight row: so many rows are too many for the hardware

struct GemvScratch {
  uint16_t weights[kStripTiles * kGemvTiles * kTileSize];  // of a chunk that is not whole
  float sums[kStripTiles * kSums];                         // [output][row of x]
};

// Tile registers 0-1: sums, 2-3: weights, 4: x. Configured while this lives.
class GemvRegisters {
 public:
  explicit GemvRegisters(int num_rows) {
    TileConfig config;
    config.row_bytes[0] = config.row_bytes[1] = config.row_bytes[4] =
        static_cast<uint16_t>(4 * num_rows);
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC thinks that eight bytes are read
    _tile_loadconfig(&config);
  }
  ~GemvRegisters() { _tile_release(); }
  GemvRegisters(const GemvRegisters&) = delete;
  GemvRegisters& operator=(const GemvRegisters&) = delete;
};

// x as tiles of num_rows columns: [tile][16 pairs][num_rows][2], zeros behind the last column.
void pack_gemv_inputs(int64_t cols, const float* const* x, int num_rows, uint16_t* out) {
  for (int64_t col = 0; col < cols; col += kTileCols, out += kTileCols * num_rows)
    for (int r = 0; r < num_rows; ++r) {
      alignas(64) uint16_t values[kTileCols];
      _mm512_store_si512(values, round_inputs(x[r] + col, cols - col));
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i)
        std::memcpy(out + (i * num_rows + r) * 2, values + 2 * i, 4);
    }
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

// Where the tiles of a chunk of a strip lie: those of outputs 0-15, then of 16-31.
struct WeightTiles {
  const uint8_t* first;
  const uint8_t* second;
  int64_t row_bytes, tile_bytes;
};

// `rows` rows of a chunk that has fewer than kStripRows rows or an open end, copied.
[[gnu::always_inline]] inline WeightTiles copy_tiles(const uint8_t* p, int64_t stride, int64_t rows,
                                                     int64_t cols, GemvScratch& scratch) {
  uint16_t* second = scratch.weights + kGemvTiles * kTileSize;
  for (int64_t n = 0; n < rows; ++n, p += stride) {
    uint16_t* dst = (n < kTileRows ? scratch.weights : second) + n % kTileRows * kTileCols;
    for (int64_t col = 0; col < cols; col += kTileCols, dst += kTileSize)
      _mm512_store_si512(dst, _mm512_maskz_loadu_epi16(first32(cols - col), p + 2 * col));
  }
  return {reinterpret_cast<const uint8_t*>(scratch.weights),
          reinterpret_cast<const uint8_t*>(second), 2 * kTileCols, 2 * kTileSize};
}

void gemv_strip(const MatrixView& w, int64_t row, int64_t rows, const RowsAhead& rows_ahead,
                const uint16_t* x, int64_t num_rows, float* const* y, GemvScratch& scratch) {
  const int64_t stride = w.row_stride_bytes, x_stride = 4 * num_rows;
  constexpr int64_t kChunkCols = kGemvTiles * kTileCols;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t col = 0; col < w.cols; col += kChunkCols) {
    const int64_t cols = w.cols - col < kChunkCols ? w.cols - col : kChunkCols;
    const uint8_t* p = w.data + row * stride + 2 * col;
    const RowsAhead ahead = rows_ahead.from(2 * col);
    for (int64_t n = 0; n < rows; ++n) ahead.fetch(n, 2 * kChunkCols);
    WeightTiles tiles{p, p + kTileRows * stride, stride, 2 * kTileCols};
    if (rows < kStripRows || cols < kChunkCols) tiles = copy_tiles(p, stride, rows, cols, scratch);
    __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (int64_t left = cols; left > 0; left -= kTileCols, x += kTileCols * num_rows) {
      _tile_loadd(4, x, x_stride);
      _tile_loadd(2, tiles.first, tiles.row_bytes);
      _tile_loadd(3, tiles.second, tiles.row_bytes);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
      tiles.first += tiles.tile_bytes;
      tiles.second += tiles.tile_bytes;
    }
    __asm__ volatile("" ::: "memory");  // nor may the next chunk's copy begin before
  }
  _tile_stored(0, scratch.sums, x_stride);
  _tile_stored(1, scratch.sums + kTileRows * num_rows, x_stride);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t n = 0; n < rows; ++n) y[r][row + n] = scratch.sums[n * num_rows + r];
}

// Decode class.
void gemv_bf16(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
               int num_rows, float* const* y, void* memory, KeptInputs* kept) {
  auto* inputs = static_cast<uint16_t*>(kept != nullptr ? kept->memory : memory);
  constexpr auto kernel = &gemv_bf16;
  if (kept == nullptr ||
      !kept->ready(w, Compute::kBF16, num_rows, reinterpret_cast<const void*>(kernel)))
    pack_gemv_inputs(w.cols, x, num_rows, inputs);
  constexpr size_t kInputsBytes = kMaxGemvRows * kMaxColumns * 4;
  static_assert(sizeof(GemvScratch) + kInputsBytes <= kMatmulScratchBytes);
  auto& scratch = *reinterpret_cast<GemvScratch*>(static_cast<uint8_t*>(memory) + kInputsBytes);
  const GemvRegisters registers(num_rows);
  const int64_t stride = w.row_stride_bytes;
  for (int64_t row = row_begin; row < row_end; row += kStripRows) {
    const uint8_t* rows = w.data + row * stride;
    RowsAhead ahead{rows, rows + kStripRows * stride, stride, stride, 2 * w.cols};
    if (row + kStripRows >= row_end && kept != nullptr && kept->next_rows != nullptr) {
      ahead.next = kept->next_rows;
      ahead.next_stride = kept->next_stride_bytes;
    }
    gemv_strip(w, row, row_end - row < kStripRows ? row_end - row : kStripRows, ahead, inputs,
               num_rows, y, scratch);
  }
}
