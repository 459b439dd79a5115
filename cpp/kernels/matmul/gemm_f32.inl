// gemm in float32: panels of weight rows are decoded and transposed once, then met by all rows
// of x.

constexpr int64_t kPanel = kGemmVectors * kLanes;  // weight rows side by side
constexpr int64_t kDepth = 256;                    // columns packed at a time
constexpr int64_t kPanels = 256 / kPanel;          // panels packed at a time
constexpr int64_t kChunk = 120;                    // rows of x copied at a time

// packed[k - k0][n] = W[row + n][k] for n < kPanel, zeros for rows from row_end on. `rows` has room
// for kPanel rows of kDepth.
void pack_panel(const MatrixView& w, int64_t row, int64_t row_end, int64_t k0, int64_t depth,
                float* rows, float* packed) {
  const int64_t end = row + kPanel < row_end ? row + kPanel : row_end;
  load_rows(w, row, end, Span(w, k0, depth), kDepth, rows);
  for (int64_t n = 0; n < kPanel; n += kLanes)
    for (int64_t k = 0; k < depth; k += kLanes) {
      Lanes tile[kLanes];
      for (int i = 0; i < kLanes; ++i)
        tile[i] = row + n + i < end ? load(rows + (n + i) * kDepth + k) : zero();
      transpose(tile);
      for (int64_t i = 0; i < kLanes && k + i < depth; ++i)
        store(packed + (k + i) * kPanel + n, tile[i]);
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

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (num_rows <= kMaxGemvRows)  // too few rows to pay for the transposition
    return gemv(w, row_begin, row_end, compute, x, static_cast<int>(num_rows), y, scratch, nullptr);
  constexpr int64_t kPanelFloats = kDepth * kPanel;
  float* packed = static_cast<float*>(scratch);      // [kPanels][kDepth][kPanel]
  float* unpacked = packed + kPanels * kPanelFloats;  // [kPanel][kDepth]
  float* inputs = unpacked + kPanelFloats;           // [kChunk][kDepth]
  for (int64_t begin = row_begin; begin < row_end; begin += kPanels * kPanel) {
    const int64_t end = begin + kPanels * kPanel < row_end ? begin + kPanels * kPanel : row_end;
    for (int64_t k0 = 0; k0 < w.cols; k0 += kDepth) {
      const int64_t depth = w.cols - k0 < kDepth ? w.cols - k0 : kDepth;
      for (int64_t column = begin; column < end; column += kPanel)
        pack_panel(w, column, row_end, k0, depth, unpacked,
                   packed + (column - begin) / kPanel * kPanelFloats);
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
