// Stored columns as float32 values, scales and zero points applied: what gemm packs, and what the
// products multiply that have no decoder of their own.

// The columns [col, col + count) of any stored row, and where they stand in the scale grid.
struct Span {
  int64_t col, count;
  int64_t scale_index = 0;  // in a row of the grid
  int64_t scale_left = 0;   // columns before the next scale

  [[gnu::always_inline]] Span(const MatrixView& w, int64_t col_, int64_t count_)
      : col(col_), count(count_) {
    if (w.scale == nullptr) return;
    scale_index = (col + w.col_origin) / w.block_cols;
    scale_left = w.block_cols - (col + w.col_origin) % w.block_cols;
  }
};

// Every second of `count` elements, side by side.
template <typename Element>
[[gnu::always_inline]] inline void gather(const uint8_t* p, int64_t count, uint8_t* dst) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(dst + i * sizeof(Element), p + 2 * i * sizeof(Element), sizeof(Element));
}

// F32, F16, BF16.
template <Format kFormat>
[[gnu::always_inline]] inline void plain_values(const MatrixView& w, const uint8_t* row,
                                                const Span& span, float* dst) {
  using Element = std::conditional_t<kFormat == Format::kF32, uint32_t, uint16_t>;
  for (int64_t k = 0; k < span.count; k += kTile) {
    const int64_t n = span.count - k < kTile ? span.count - k : kTile;
    Lanes out[kTileLanes];
    if (w.col_step == 2) {
      alignas(64) uint8_t bytes[kTile * sizeof(Element)] = {};
      gather<Element>(row + 2 * (span.col + k) * sizeof(Element), n, bytes);
      decode_tile<kFormat, true>(bytes, 0, kTile, out);
    } else {
      decode_tile<kFormat, true>(row, span.col + k, n, out);
    }
    for (int v = 0; v < kTileLanes; ++v) store(dst + k + v * kLanes, out[v]);
  }
}

// Formats with one scale a group of columns, in a grid.
template <Format kFormat>
[[gnu::always_inline]] inline void grid_values(const MatrixView& w, const uint8_t* row,
                                               const uint8_t* scales, const Span& span,
                                               float* dst) {
  int64_t index = span.scale_index, end = span.scale_left;
  for (int64_t k = 0; k < span.count; ++index, end += w.block_cols) {
    const Lanes scale =
        broadcast(Decoder<kFormat>::kGain * load_scale(w.scale_type, scales, index));
    const int64_t stop = end < span.count ? end : span.count;
    for (; k < stop; k += kTile) {
      Lanes out[kTileLanes];
      decode_tile<kFormat, true>(row, span.col + k, stop - k < kTile ? stop - k : kTile, out);
      for (int v = 0; v < kTileLanes; ++v) store(dst + k + v * kLanes, mul(out[v], scale));
    }
    k = stop;
  }
}

// GGUF blocks.
template <Format kFormat>
[[gnu::always_inline]] inline void block_values(const uint8_t* row, const Span& span, float* dst) {
  alignas(64) float scales[kBlockScales];
  for (int64_t k = 0; k < span.count; k += kTile) {
    const int64_t col = span.col + k;
    Lanes out[kTileLanes];
    if constexpr (Decoder<kFormat>::kScaling == Scaling::kSubBlocks) {
      if (k == 0 || col % 256 == 0)
        Decoder<kFormat>::scales(row + col / 256 * unit_of(kFormat).bytes, scales);
      sub_block_tile<kFormat>(row, col / 128 * 128, static_cast<int>(col / 32 % 4), scales, out);
    } else {
      Decoder<kFormat>::template tile<true>(row, col, out);
    }
    for (int v = 0; v < kTileLanes; ++v) {
      if constexpr (Decoder<kFormat>::kScaling == Scaling::kBlock)
        out[v] = mul(out[v], broadcast(Decoder<kFormat>::scale(row, col)));
      store(dst + k + v * kLanes, out[v]);
    }
  }
}

// What stored rows that share a row of the scale grid have in common, kAWQ and kGPTQ:
// value = code * scale + offset, both exact.
struct ColumnScales {
  Lanes scale[kTileLanes], offset[kTileLanes];
};

// Of the columns [col, col + count), count <= kTile; anything behind.
template <Format kFormat>
[[gnu::always_inline]] inline void load_columns(const MatrixView& w, int64_t grid_row, int64_t col,
                                                int64_t count, ColumnScales& columns) {
  const int64_t grid_col = col + w.col_origin;
  alignas(64) float scales[kTile] = {};
  convert_scales(w.scale_type,
                 w.scale + grid_row * w.scale_row_stride_bytes +
                     grid_col * scale_bytes(w.scale_type),
                 count, 1.0f, scales);
  alignas(64) uint8_t zeros[kTile / 2] = {};
  std::memcpy(zeros, w.zeros + grid_row * w.zeros_row_stride_bytes + grid_col / 2,
              static_cast<size_t>((count + 7) / 8 * 4));
  for (int v = 0; v < kTileLanes; ++v) {
    const Lanes zero_point = to_float(Decoder<kFormat>::zeros(zeros + v * kLanes / 2));
    columns.scale[v] = load(scales + v * kLanes);
    columns.offset[v] = mul(sub(zero(), zero_point), columns.scale[v]);
  }
}

// Values of a tile of stored row n; only the first `count` columns are read, anything behind.
template <Format kFormat>
[[gnu::always_inline]] inline void column_tile(const MatrixView& w, int64_t n, int64_t col,
                                               int64_t count, const ColumnScales& columns,
                                               Lanes* out) {
  constexpr Unit kUnit = unit_of(kFormat);
  const int64_t stored_row = kFormat == Format::kGPTQ ? n / 8 : n;
  const uint8_t* p = w.data + stored_row * w.row_stride_bytes + col / kUnit.cols * kUnit.bytes;
  alignas(64) uint8_t bytes[kTile * kUnit.bytes / kUnit.cols];
  if (count < kTile) {
    std::memset(bytes, 0, sizeof bytes);
    std::memcpy(bytes, p, static_cast<size_t>(count / kUnit.cols * kUnit.bytes));
    p = bytes;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kTileLanes; ++v)
    out[v] = fma(to_float(Decoder<kFormat>::codes(p, v, n)), columns.scale[v], columns.offset[v]);
}

// The first stored row behind `row` that may use another row of the grid.
[[gnu::always_inline]] inline int64_t next_grid_row(const MatrixView& w, int64_t row) {
  if (w.group_index != nullptr) return row + 1;
  return row + w.block_rows - (row + w.row_origin) % w.block_rows;
}

// load_rows for kAWQ and kGPTQ.
template <Format kFormat>
[[gnu::always_inline]] inline void column_values(const MatrixView& w, int64_t begin, int64_t end,
                                                 const Span& span, int64_t stride, float* dst) {
  for (int64_t k = 0; k < span.count; k += kTile) {
    const int64_t n = span.count - k < kTile ? span.count - k : kTile;
    ColumnScales columns{};
    int64_t next = begin;
    for (int64_t row = begin; row < end; ++row) {
      if (row == next) {
        load_columns<kFormat>(w, w.grid_row(row), span.col + k, n, columns);
        next = next_grid_row(w, row);
      }
      Lanes out[kTileLanes];
      column_tile<kFormat>(w, row, span.col + k, n, columns, out);
      for (int v = 0; v < kTileLanes; ++v)
        store(dst + (row - begin) * stride + k + v * kLanes, out[v]);
    }
  }
}

// dst[(row - begin) * stride + i] = stored element (row, span.col + i) for the rows [begin, end);
// up to kTile - 1 floats behind each row may be written, too. span.col is a multiple of kTile.
void load_rows(const MatrixView& w, int64_t begin, int64_t end, const Span& span, int64_t stride,
               float* dst) {
  for_format(w.format, [&](auto format) {
    constexpr Format kFormat = format.value;
    if constexpr (Decoder<kFormat>::kScaling == Scaling::kColumn)
      return column_values<kFormat>(w, begin, end, span, stride, dst);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* data = w.data + row * w.row_stride_bytes;
      float* values = dst + (row - begin) * stride;
      if constexpr (Decoder<kFormat>::kScaling == Scaling::kGrid)
        grid_values<kFormat>(w, data, w.scale + w.grid_row(row) * w.scale_row_stride_bytes, span,
                             values);
      else if constexpr (unit_of(kFormat).cols == 1 && Decoder<kFormat>::kScaling == Scaling::kNone)
        plain_values<kFormat>(w, data, span, values);
      else if constexpr (unit_of(kFormat).cols >= kTile)
        block_values<kFormat>(data, span, values);
    }
  });
}
