// gemv_transposed in float32: outer products of the natural layout, n in order.
//
// The weight is multiplied by its scale first, as in the reference, so that a column's bits do not
// depend on where the column range was split.

constexpr int64_t kTile = kOuterVectors * kLanes;
constexpr int64_t kInputs = 1024;  // inputs a row copied at a time

// Scales times kGain of the columns [col, col + count), zeros behind, for weight row `row`.
template <Format kFormat>
[[gnu::always_inline]] inline Lanes column_scales(const MatrixView& w, int64_t row, int64_t col,
                                                  int64_t count) {
  if (count == 0) return zero();
  const uint8_t* scales = scale_row(w, row);
  const int64_t scale_col = (col + w.col_origin) / w.block_cols;
  int64_t left = w.block_cols - (col + w.col_origin) % w.block_cols;  // in this block
  if (left >= count) return broadcast(gain<kFormat>(scales, scale_col));
  alignas(64) float lanes[kLanes] = {};
  for (int64_t i = 0, block = scale_col; i < count; ++i, --left) {
    if (left == 0) {
      left = w.block_cols;
      ++block;
    }
    lanes[i] = gain<kFormat>(scales, block);
  }
  return load(lanes);
}

template <Format kFormat, int kRows>
[[gnu::always_inline]] inline void outer_tile(const MatrixView& w, int64_t col, int64_t count,
                                              const float* inputs, int64_t n_begin, int64_t n_end,
                                              float* const* y) {
  Lanes acc[kRows][kOuterVectors], scale[kOuterVectors];
  int64_t left[kOuterVectors];
  for (int v = 0; v < kOuterVectors; ++v) {
    const int64_t rest = count - v * kLanes;
    left[v] = rest < 0 ? 0 : rest < kLanes ? rest : kLanes;
    scale[v] = zero();
    for (int r = 0; r < kRows; ++r)
      acc[r][v] = n_begin == 0 ? zero() : load_some(y[r] + col + v * kLanes, left[v]);
  }
  int64_t next_scales = n_begin;
  for (int64_t n = n_begin; n < n_end; ++n) {
    if constexpr (kFormat == Format::kFP8)
      if (n == next_scales) {
        for (int v = 0; v < kOuterVectors; ++v)
          scale[v] = column_scales<kFormat>(w, n, col + v * kLanes, left[v]);
        next_scales = n + w.block_rows - (n + w.row_origin) % w.block_rows;
      }
    const uint8_t* p = w.data + n * w.row_stride_bytes + col * element_bytes(kFormat);
    Lanes weight[kOuterVectors];
    for (int v = 0; v < kOuterVectors; ++v) {
      const uint8_t* q = p + v * kLanes * element_bytes(kFormat);
      weight[v] = left[v] == kLanes ? decode<kFormat>(q)
                  : left[v] > 0     ? decode<kFormat>(q, left[v])
                                    : zero();
      if constexpr (kFormat == Format::kFP8) weight[v] = mul(weight[v], scale[v]);
    }
    for (int r = 0; r < kRows; ++r) {
      const Lanes input = broadcast(inputs[r * kInputs + (n - n_begin)]);
      for (int v = 0; v < kOuterVectors; ++v) acc[r][v] = fma(input, weight[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kOuterVectors; ++v)
      if (left[v] > 0) store(y[r] + col + v * kLanes, acc[r][v], left[v]);
}

template <Format kFormat, int kRows>
void outer_rows(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                const float* const* x, float* const* y, float* inputs) {
  for (int64_t n = 0; n < w.rows; n += kInputs) {
    const int64_t count = w.rows - n < kInputs ? w.rows - n : kInputs;
    for (int r = 0; r < kRows; ++r) copy_inputs(x[r] + n, count, compute, inputs + r * kInputs);
    for (int64_t col = col_begin; col < col_end; col += kTile)
      outer_tile<kFormat, kRows>(w, col, col_end - col, inputs, n, n + count, y);
  }
}

template <Format kFormat>
void outer_format(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                  const float* const* x, int64_t num_rows, float* const* y, float* inputs) {
  int64_t r = 0;
  for (; r + kOuterRows <= num_rows; r += kOuterRows)
    outer_rows<kFormat, kOuterRows>(w, col_begin, col_end, compute, x + r, y + r, inputs);
  for (; r + 3 <= num_rows; r += 3)
    outer_rows<kFormat, 3>(w, col_begin, col_end, compute, x + r, y + r, inputs);
  for (; r < num_rows; ++r)
    outer_rows<kFormat, 1>(w, col_begin, col_end, compute, x + r, y + r, inputs);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (!vectorised(w)) return kMatmulRef.gemv_transposed(w, col_begin, col_end, compute, x, num_rows, y, scratch);
  float* inputs = static_cast<float*>(scratch);
  switch (w.format) {
    case Format::kF32:
      return outer_format<Format::kF32>(w, col_begin, col_end, compute, x, num_rows, y, inputs);
    case Format::kBF16:
      return outer_format<Format::kBF16>(w, col_begin, col_end, compute, x, num_rows, y, inputs);
    case Format::kFP8:
      return outer_format<Format::kFP8>(w, col_begin, col_end, compute, x, num_rows, y,
                                             inputs);
    default: return;
  }
}
