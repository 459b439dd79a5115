// gemv_transposed in float32: outer products of the natural layout, n in order.
//
// A tile of columns is decoded whole, at multiples of kTile, even where only a part is asked for;
// the weight is multiplied by its scale first, as in the reference. So a column's bits depend
// neither on where the column range was split nor on how the rows of x were gathered.

constexpr int64_t kDeep = 128;                // weight rows at a time
constexpr int64_t kInputStride = kDeep + 16;  // rows of x in different sets of the cache
constexpr int64_t kOuterChunk = 64;           // rows of x at a time
constexpr int64_t kAhead = 24;                // stored rows between prefetch and use

// One row of x against the whole tile [col, col + kTile), straight from the stored bytes;
// where its columns share a scale of the grid or have none.
template <Format kFormat>
[[gnu::always_inline]] inline void outer_single(const MatrixView& w, int64_t col,
                                                const float* inputs, int64_t n_begin, int64_t n_end,
                                                float* y) {
  constexpr Scaling kScaling = Decoder<kFormat>::kScaling;
  Lanes acc[kTileLanes], scale = zero();
  for (int v = 0; v < kTileLanes; ++v) acc[v] = n_begin == 0 ? zero() : load(y + col + v * kLanes);
  const int64_t first_byte = col / unit_of(kFormat).cols * unit_of(kFormat).bytes;
  ColumnScales columns{};
  int64_t next_scales = n_begin;
  for (int64_t n = n_begin; n < n_end; ++n) {
    if (kScaling == Scaling::kGrid || kScaling == Scaling::kColumn)
      if (n == next_scales) {
        const int64_t grid_row = w.grid_row(n);
        next_scales = next_grid_row(w, n);
        if constexpr (kScaling == Scaling::kColumn)
          load_columns<kFormat>(w, grid_row, col, kTile, columns);
        if constexpr (kScaling == Scaling::kGrid)
          scale = broadcast(Decoder<kFormat>::kGain *
                            load_scale(w.scale_type, w.scale + grid_row * w.scale_row_stride_bytes,
                                       (col + w.col_origin) / w.block_cols));
      }
    const int64_t stored_row = kFormat == Format::kGPTQ ? n / 8 : n;
    const uint8_t* row = w.data + stored_row * w.row_stride_bytes;
    _mm_prefetch(reinterpret_cast<const char*>(row + kAhead * w.row_stride_bytes + first_byte),
                 _MM_HINT_T0);
    Lanes weight[kTileLanes];
    if constexpr (kScaling == Scaling::kColumn) {
      column_tile<kFormat>(w, n, col, kTile, columns, weight);
    } else if constexpr (kScaling == Scaling::kSubBlocks) {
      alignas(64) float scales[kBlockScales];
      Decoder<kFormat>::scales(row + col / 256 * unit_of(kFormat).bytes, scales);
      sub_block_tile<kFormat>(row, col / 128 * 128, static_cast<int>(col / 32 % 4), scales, weight);
    } else {
      Decoder<kFormat>::template tile<true>(row, col, weight);
    }
    if constexpr (kScaling == Scaling::kBlock)
      scale = broadcast(Decoder<kFormat>::scale(row, col));
    const Lanes input = broadcast(inputs[n - n_begin]);
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      if constexpr (kScaling == Scaling::kGrid || kScaling == Scaling::kBlock)
        weight[v] = mul(weight[v], scale);
      acc[v] = fma(input, weight[v], acc[v]);
    }
  }
  for (int v = 0; v < kTileLanes; ++v) store(y + col + v * kLanes, acc[v]);
}

// kRows rows of x against `count` weight rows of float32 values, of whose tile kVectors from
// `values` on; lanes [first[v], last[v]) of them are wanted. `y` points at the same columns.
template <int kRows, int kVectors>
void outer_values(const float* values, int64_t count, const float* inputs, const int64_t* first,
                  const int64_t* last, bool fresh, float* const* y) {
  Lanes acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = fresh ? zero() : load_between(y[r] + v * kLanes, first[v], last[v]);
  for (int64_t n = 0; n < count; ++n) {
    Lanes weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = load(values + n * kTile + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes input = broadcast(inputs[r * kInputStride + n]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, weight[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      store_between(y[r] + v * kLanes, acc[r][v], first[v], last[v]);
}

// All rows of x against the columns of the tile at `col` that lie in [begin, end).
void outer_tile(const float* values, int64_t count, const float* inputs, int64_t col, int64_t begin,
                int64_t end, bool fresh, float* const* y, int64_t num_rows) {
  int64_t first[kTileLanes], last[kTileLanes];
  for (int v = 0; v < kTileLanes; ++v) {
    const int64_t from = begin - col - v * kLanes, to = end - col - v * kLanes;
    first[v] = from < 0 ? 0 : from < kLanes ? from : kLanes;
    last[v] = to < 0 ? 0 : to < kLanes ? to : kLanes;
  }
  for (int v = 0; v < kTileLanes; v += kOuterVectors) {
    const float* part = values + v * kLanes;
    float* outputs[kOuterRows];
    for (int64_t r = 0; r < num_rows;) {
      const int64_t left = num_rows - r;
      const int64_t rows = left >= kOuterRows ? kOuterRows : left >= 3 ? 3 : 1;
      for (int64_t i = 0; i < rows; ++i) outputs[i] = y[r + i] + col + v * kLanes;
      const auto kernel = rows == kOuterRows ? outer_values<kOuterRows, kOuterVectors>
                          : rows == 3        ? outer_values<3, kOuterVectors>
                                             : outer_values<1, kOuterVectors>;
      kernel(part, count, inputs + r * kInputStride, first + v, last + v, fresh, outputs);
      r += rows;
    }
  }
}

// Columns [col_begin, col_end) of a chunk of rows of x. All columns of some weight rows come before
// the next weight rows, so that memory is read in order.
void outer_chunk(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                 const float* const* x, int64_t num_rows, float* const* y, float* scratch) {
  float* inputs = scratch;                               // [kOuterChunk][kInputStride]
  float* values = scratch + kOuterChunk * kInputStride;  // [kDeep][kTile]
  for (int64_t n = 0; n < w.rows; n += kDeep) {
    const int64_t end = w.rows - n < kDeep ? w.rows : n + kDeep;
    for (int64_t r = 0; r < num_rows; ++r)
      copy_inputs(x[r] + n, end - n, compute, inputs + r * kInputStride);
    for (int64_t col = col_begin / kTile * kTile; col < col_end; col += kTile) {
      const Span span(w, col, w.cols - col < kTile ? w.cols - col : kTile);
      const bool whole = w.col_step == 1 && col_begin <= col && col + kTile <= col_end;
      const bool one_scale = !has_row_scales(w.format) || span.scale_left >= kTile;
      if (num_rows == 1 && whole && one_scale) {
        for_format(w.format, [&](auto format) {
          outer_single<format.value>(w, col, inputs, n, end, y[0]);
        });
      } else {
        load_rows(w, n, end, span, kTile, values);
        outer_tile(values, end - n, inputs, col, col_begin, col_end, n == 0, y, num_rows);
      }
    }
  }
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  for (int64_t r = 0; r < num_rows; r += kOuterChunk)
    outer_chunk(w, col_begin, col_end, compute, x + r,
                num_rows - r < kOuterChunk ? num_rows - r : kOuterChunk, y + r,
                static_cast<float*>(scratch));
}
