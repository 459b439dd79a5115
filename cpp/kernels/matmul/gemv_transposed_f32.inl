// gemv_transposed in float32: outer products of the natural layout, n in order.
//
// A tile of columns is decoded whole, at multiples of kTile, even where only a part is asked for;
// the weight is multiplied by its scale first, as in the reference. So a column's bits do not depend
// on where the column range was split.

constexpr int64_t kInputs = 1024;  // inputs a row copied at a time

// What stored rows that share a row of the scale grid have in common: value = code * scale + offset.
struct ColumnScales {
  Lanes scale[kTileLanes], offset[kTileLanes];
};

// Of the columns [col, col + count) of stored row `row`; anything behind.
template <Format kFormat>
[[gnu::always_inline]] inline void load_columns(const MatrixView& w, int64_t row, int64_t col,
                                                int64_t count, ColumnScales& columns) {
  alignas(64) float scales[kTile];
  const uint8_t* p = w.scale + w.grid_row(row) * w.scale_row_stride_bytes;
  if constexpr (Decoder<kFormat>::kScaling == Scaling::kColumn) {
    const int64_t grid_col = col + w.col_origin;
    convert_scales(w.scale_type, p + grid_col * scale_bytes(w.scale_type), count, 1.0f, scales);
    alignas(64) uint8_t zeros[kTile / 2] = {};
    std::memcpy(zeros, w.zeros + w.grid_row(row) * w.zeros_row_stride_bytes + grid_col / 2,
                static_cast<size_t>((count + 7) / 8 * 4));
    for (int v = 0; v < kTileLanes; ++v) {
      const Lanes zero_point = to_float(Decoder<kFormat>::zeros(zeros + v * kLanes / 2));
      columns.scale[v] = load(scales + v * kLanes);
      columns.offset[v] = mul(sub(zero(), zero_point), columns.scale[v]);
    }
  } else {
    constexpr float kGain = Decoder<kFormat>::kGain;
    int64_t index = (col + w.col_origin) / w.block_cols;
    int64_t left = w.block_cols - (col + w.col_origin) % w.block_cols;  // in this block
    float scale = kGain * load_scale(w.scale_type, p, index);
    if (left >= count) {
      for (int v = 0; v < kTileLanes; ++v) columns.scale[v] = broadcast(scale);
      return;
    }
    for (int64_t i = 0; i < count; ++i, --left) {
      if (left == 0) {
        left = w.block_cols;
        scale = kGain * load_scale(w.scale_type, p, ++index);
      }
      scales[i] = scale;
    }
    for (int v = 0; v < kTileLanes; ++v) columns.scale[v] = load(scales + v * kLanes);
  }
}

// The first stored row behind `row` that may have other scales.
[[gnu::always_inline]] inline int64_t next_scale_row(const MatrixView& w, int64_t row) {
  if (w.group_index != nullptr) return row + 1;
  return row + w.block_rows - (row + w.row_origin) % w.block_rows;
}

// `count` elements of `bytes` each, every second one, side by side.
[[gnu::always_inline]] inline void gather(const uint8_t* p, int64_t bytes, int64_t count,
                                          uint8_t* dst) {
  if (bytes == 4)
    for (int64_t i = 0; i < count; ++i) std::memcpy(dst + 4 * i, p + 8 * i, 4);
  else
    for (int64_t i = 0; i < count; ++i) std::memcpy(dst + 2 * i, p + 4 * i, 2);
}

// Values of the columns [col, col + count) of stored row n; anything behind. With kPlainTile, whole
// tiles of neighbouring columns.
template <Format kFormat, bool kPlainTile>
[[gnu::always_inline]] inline void decode_columns_of(const MatrixView& w, int64_t n, int64_t col,
                                                     int64_t count, const ColumnScales& columns,
                                                     Lanes* out) {
  constexpr Unit kUnit = unit_of(kFormat);
  constexpr Scaling kScaling = Decoder<kFormat>::kScaling;
  const uint8_t* row = w.data + n * w.row_stride_bytes;
  if constexpr (kFormat == Format::kAWQ || kFormat == Format::kGPTQ) {
    if constexpr (kFormat == Format::kGPTQ) row = w.data + n / 8 * w.row_stride_bytes;
    alignas(64) uint8_t bytes[kTile * kUnit.bytes / kUnit.cols] = {};
    const uint8_t* p = row + col / kUnit.cols * kUnit.bytes;
    if (!kPlainTile && count < kTile) {
      std::memcpy(bytes, p, static_cast<size_t>(count / kUnit.cols * kUnit.bytes));
      p = bytes;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      Ints codes;
      if constexpr (kFormat == Format::kAWQ)
        codes = Decoder<kFormat>::codes(p + v * kLanes / 2);
      else
        codes = load_words(p + v * kLanes * 4) >> static_cast<uint32_t>(n % 8 * 4) & 15u;
      out[v] = fma(to_float(codes), columns.scale[v], columns.offset[v]);
    }
  } else {
    constexpr bool kMaySkip = !kPlainTile && kUnit.cols == 1 && kScaling == Scaling::kNone;
    if (kMaySkip && w.col_step == 2) {
      alignas(64) uint8_t bytes[kTile * 4] = {};
      gather(row + col * 2 * kUnit.bytes, kUnit.bytes, count, bytes);
      decode_tile<kFormat, true>(bytes, 0, kTile, out);
    } else {
      decode_tile<kFormat, true>(row, col, kPlainTile ? kTile : count, out);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTileLanes; ++v) {
      if constexpr (kScaling == Scaling::kGrid) out[v] = mul(out[v], columns.scale[v]);
      if constexpr (kScaling == Scaling::kBlock)
        out[v] = mul(out[v], broadcast(Decoder<kFormat>::scale(row, col)));
    }
  }
}

// Columns of the tile [col, col + kTile) that lie in [begin, end), rows [n_begin, n_end); of the
// tile's lanes kVectors from kFirst on. With kPlainTile all of them are wanted, and col_step is 1.
template <Format kFormat, int kRows, int kFirst, int kVectors, bool kPlainTile>
[[gnu::always_inline]] inline void outer_lanes(const MatrixView& w, int64_t col, int64_t begin,
                                               int64_t end, const float* inputs, int64_t n_begin,
                                               int64_t n_end, float* const* y) {
  constexpr Scaling kScaling = Decoder<kFormat>::kScaling;
  constexpr bool kColumnScales = kScaling == Scaling::kGrid || kScaling == Scaling::kColumn;
  const int64_t count = w.cols - col < kTile ? w.cols - col : kTile;
  int64_t first[kVectors], left[kVectors];  // wanted lanes of each vector
  Lanes acc[kRows][kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t begin_lane = begin - col - (kFirst + v) * kLanes;
    const int64_t end_lane = end - col - (kFirst + v) * kLanes;
    first[v] = kPlainTile || begin_lane < 0 ? 0 : begin_lane;
    left[v] = kPlainTile || end_lane > kLanes ? kLanes : end_lane;
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = n_begin == 0 ? zero()
                               : load_between(y[r] + col + (kFirst + v) * kLanes, first[v], left[v]);
  ColumnScales columns{};
  int64_t next_scales = n_begin;
  for (int64_t n = n_begin; n < n_end; ++n) {
    if constexpr (kColumnScales)
      if (n == next_scales) {
        load_columns<kFormat>(w, n, col, count, columns);
        next_scales = next_scale_row(w, n);
      }
    Lanes weight[kTileLanes];
    decode_columns_of<kFormat, kPlainTile>(w, n, col, count, columns, weight);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes input = broadcast(inputs[r * kInputs + (n - n_begin)]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, weight[kFirst + v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      store_between(y[r] + col + (kFirst + v) * kLanes, acc[r][v], first[v], left[v]);
}

template <Format kFormat, int kRows, bool kPlainTile>
[[gnu::always_inline]] inline void outer_tile(const MatrixView& w, int64_t col, int64_t begin,
                                              int64_t end, const float* inputs, int64_t n_begin,
                                              int64_t n_end, float* const* y) {
  constexpr int kVectors = kRows > 1 ? kOuterVectors : kTileLanes;
  outer_lanes<kFormat, kRows, 0, kVectors, kPlainTile>(w, col, begin, end, inputs, n_begin, n_end,
                                                       y);
  if constexpr (kVectors < kTileLanes)
    outer_lanes<kFormat, kRows, kVectors, kVectors, kPlainTile>(w, col, begin, end, inputs, n_begin,
                                                                n_end, y);
}

template <Format kFormat, int kRows>
void outer_rows(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                const float* const* x, float* const* y, float* inputs) {
  if (col_begin >= col_end) return;
  for (int64_t n = 0; n < w.rows; n += kInputs) {
    const int64_t count = w.rows - n < kInputs ? w.rows - n : kInputs;
    for (int r = 0; r < kRows; ++r) copy_inputs(x[r] + n, count, compute, inputs + r * kInputs);
    for (int64_t col = col_begin / kTile * kTile; col < col_end; col += kTile)
      if (w.col_step == 1 && col_begin <= col && col + kTile <= col_end)
        outer_tile<kFormat, kRows, true>(w, col, col_begin, col_end, inputs, n, n + count, y);
      else
        outer_tile<kFormat, kRows, false>(w, col, col_begin, col_end, inputs, n, n + count, y);
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
  for_format(w.format, [&](auto format) {
    outer_format<format.value>(w, col_begin, col_end, compute, x, num_rows, y,
                               static_cast<float*>(scratch));
  });
}
