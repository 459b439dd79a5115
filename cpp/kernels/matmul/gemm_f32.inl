// gemm in float32: panels of weight rows are decoded and transposed once, then met by all rows
// of x.

constexpr int64_t kPanel = kGemmVectors * kLanes;  // weight rows side by side
constexpr int64_t kDepth = 256;                    // columns packed at a time
constexpr int64_t kPanels = 256 / kPanel;          // panels packed at a time
constexpr int64_t kChunk = 120;                    // rows of x copied at a time

// tile[v][i] = lanes of columns [k, k + count) of stored row `row` + i, values; zeros for rows from
// row_end on.
template <Format kFormat>
[[gnu::always_inline]] inline void decode_rows(const MatrixView& w, int64_t row, int64_t row_end,
                                               int64_t k, int64_t count, const Lanes* scale,
                                               Lanes (*tile)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    Lanes out[kTileLanes];
    const uint8_t* data = w.data + (row + i) * w.row_stride_bytes;
    if (row + i < row_end) decode_tile<kFormat, true>(data, k, count, out);
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      if (row + i >= row_end)
        tile[v][i] = zero();
      else if constexpr (Decoder<kFormat>::kScaling == Scaling::kGrid)
        tile[v][i] = mul(out[v], scale[i]);
      else if constexpr (Decoder<kFormat>::kScaling == Scaling::kBlock)
        tile[v][i] = mul(out[v], broadcast(Decoder<kFormat>::scale(data, k)));
      else
        tile[v][i] = out[v];
    }
  }
}

// packed[k - k0][n] = W[row + n][k] for n < kPanel, zeros for rows beyond row_end. `g` is the group
// of k0 and is left at that of the last column.
template <Format kFormat>
void pack_panel(const MatrixView& w, int64_t row, int64_t row_end, int64_t k0, int64_t depth,
                Groups& g, float* packed) {
  const Groups start = g;
  for (int64_t n = 0; n < kPanel; n += kLanes) {
    g = start;
    for (int64_t k = k0; k < k0 + depth;) {
      if (k == g.end) g.next();
      const int64_t end = g.end < k0 + depth ? g.end : k0 + depth;
      Lanes scale[kLanes];
      if constexpr (Decoder<kFormat>::kScaling == Scaling::kGrid)
        for (int i = 0; i < kLanes; ++i)
          if (row + n + i < row_end)
            scale[i] = broadcast(Decoder<kFormat>::kGain * load_scale(w.scale_type,
                                                                      scale_row(w, row + n + i),
                                                                      g.scale_index));
      for (; k < end; k += kTile) {
        const int64_t count = end - k < kTile ? end - k : kTile;
        Lanes tile[kTileLanes][kLanes];
        decode_rows<kFormat>(w, row + n, row_end, k, count, scale, tile);
        for (int v = 0; v < kTileLanes; ++v) {
          transpose(tile[v]);
          for (int64_t i = 0; i < kLanes && v * kLanes + i < count; ++i)
            store(packed + (k - k0 + v * kLanes + i) * kPanel + n, tile[v][i]);
        }
      }
      k = end;
    }
  }
}

// kRows rows of x against one panel; `columns` of its weight rows are wanted.
template <int kRows>
void gemm_block(const float* packed, int64_t depth, const float* x, float* const* y, int64_t column,
                int64_t columns, bool first_depth) {
  Lanes acc[kRows][kGemmVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kGemmVectors; ++v) acc[r][v] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    Lanes weight[kGemmVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kGemmVectors; ++v) weight[v] = load(packed + k * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes input = broadcast(x[r * kDepth + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kGemmVectors; ++v) acc[r][v] = fma(input, weight[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kGemmVectors; ++v) {
      const int64_t left = columns - v * kLanes;
      float* out = y[r] + column + v * kLanes;
      if (left >= kLanes)
        store(out, first_depth ? acc[r][v] : add(acc[r][v], load(out)));
      else if (left > 0)
        store(out, first_depth ? acc[r][v] : add(acc[r][v], load(out, left)), left);
    }
}

// gemm_block for `rows` in 1..kRows.
template <int kRows>
[[gnu::always_inline]] inline void gemm_rows(int64_t rows, const float* packed, int64_t depth,
                                             const float* x, float* const* y, int64_t column,
                                             int64_t columns, bool first_depth) {
  if (rows == kRows)
    gemm_block<kRows>(packed, depth, x, y, column, columns, first_depth);
  else if constexpr (kRows > 1)
    gemm_rows<kRows - 1>(rows, packed, depth, x, y, column, columns, first_depth);
}

template <Format kFormat>
void gemm_format(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
                 const float* const* x, int64_t num_rows, float* const* y, float* scratch) {
  constexpr int64_t kPanelFloats = kDepth * kPanel;
  float* packed = scratch;                           // [kPanels][kDepth][kPanel]
  float* inputs = scratch + kPanels * kPanelFloats;  // [kChunk][kDepth]
  for (int64_t begin = row_begin; begin < row_end; begin += kPanels * kPanel) {
    const int64_t end = begin + kPanels * kPanel < row_end ? begin + kPanels * kPanel : row_end;
    Groups groups(w);
    for (int64_t k0 = 0; k0 < w.cols; k0 += kDepth) {
      const int64_t depth = w.cols - k0 < kDepth ? w.cols - k0 : kDepth;
      const Groups first = groups;
      for (int64_t column = begin; column < end; column += kPanel) {
        groups = first;
        pack_panel<kFormat>(w, column, row_end, k0, depth, groups,
                            packed + (column - begin) / kPanel * kPanelFloats);
      }
      for (int64_t chunk = 0; chunk < num_rows; chunk += kChunk) {
        const int64_t rows = num_rows - chunk < kChunk ? num_rows - chunk : kChunk;
        for (int64_t r = 0; r < rows; ++r)
          copy_inputs(x[chunk + r] + k0, depth, compute, inputs + r * kDepth);
        const int64_t blocks = (rows + kGemmRows - 1) / kGemmRows;  // of nearly equal size
        for (int64_t column = begin; column < end; column += kPanel)
          for (int64_t block = 0; block < blocks; ++block) {
            const int64_t r = rows * block / blocks, r_end = rows * (block + 1) / blocks;
            gemm_rows<kGemmRows>(r_end - r, packed + (column - begin) / kPanel * kPanelFloats,
                                 depth, inputs + r * kDepth, y + chunk + r, column,
                                 row_end - column, k0 == 0);
          }
      }
    }
  }
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (num_rows <= kMaxGemvRows)  // too few rows to pay for the transposition
    return gemv(w, row_begin, row_end, compute, x, static_cast<int>(num_rows), y, scratch);
  if (!row_decoders(w))
    return kMatmulRef.gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
  for_format(w.format, [&](auto format) {
    if constexpr (Decoder<format.value>::kScaling != Scaling::kColumn)
      gemm_format<format.value>(w, row_begin, row_end, compute, x, num_rows, y,
                                static_cast<float*>(scratch));
  });
}
