// The float32 skeletons of gemv, gemm and gemv_transposed, over the lanes and decoders of one
// instruction set. Included inside that set's namespace, after its lanes_<isa>.h.
//
// FP8 decoders return 2^-8 of the value; kGain puts it back, folded into the block scale.

constexpr int64_t kGroup = 128;  // columns between two uses of a scale

template <Format kFormat>
constexpr float kGain = kFormat == Format::kFP8Block ? 256.0f : 1.0f;

// Scale of (row, col) times kGain; 1 for formats without scales.
template <Format kFormat>
[[gnu::always_inline]] inline float gain(const MatrixView& w, int64_t row, int64_t col) {
  if constexpr (kFormat == Format::kFP8Block) return load_f32(w.scale_at(row, col)) * kGain<kFormat>;
  return 1.0f;
}

// End of the group that starts at column k: within one scale block, at most kGroup columns.
template <Format kFormat>
[[gnu::always_inline]] inline int64_t group_end(const MatrixView& w, int64_t k) {
  int64_t end = k + kGroup < w.cols ? k + kGroup : w.cols;
  if constexpr (kFormat == Format::kFP8Block) {
    const int64_t edge = k + w.block_cols - (k + w.col_origin) % w.block_cols;
    end = edge < end ? edge : end;
  }
  return end;
}

// dst = src, rounded to BF16 when asked.
[[gnu::always_inline]] inline void copy_inputs(const float* src, int64_t n, Compute compute,
                                               float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes v = load(src + i);
    store(dst + i, compute == Compute::kBF16 ? round_bf16(v) : v);
  }
  if (i == n) return;
  const Lanes v = load(src + i, n - i);
  store(dst + i, compute == Compute::kBF16 ? round_bf16(v) : v, n - i);
}

// ---- gemv: kRows weight rows at a time; every weight is decoded once for all activation rows. ----
// For each (weight row, activation row) the order of operations is the same whatever kRows and
// num_rows are: lanes over k within a group, group sums times scale in k order, then the lanes.

template <Format kFormat, int kRows>
[[gnu::always_inline]] inline void gemv_rows(const MatrixView& w, int64_t row, const float* x,
                                             int64_t x_stride, int num_rows, float* const* y) {
  Lanes total[kMaxGemvRows][kRows];
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < kRows; ++i) total[r][i] = zero();
  const uint8_t* base = w.data + row * w.row_stride_bytes;
  const int64_t element = element_bytes(kFormat);
  for (int64_t k = 0; k < w.cols;) {
    const int64_t end = group_end<kFormat>(w, k), steps = (end - k) / kLanes;
    const int64_t tail = (end - k) % kLanes;
    Lanes scale[kRows];
    for (int i = 0; i < kRows; ++i) scale[i] = broadcast(gain<kFormat>(w, row + i, k));
    Lanes weight[kRows][kGroup / kLanes + 1];
    if (num_rows > 1)
      for (int i = 0; i < kRows; ++i) {
        const uint8_t* p = base + i * w.row_stride_bytes + k * element;
        for (int64_t s = 0; s < steps; ++s) weight[i][s] = decode<kFormat>(p + s * kLanes * element);
        if (tail) weight[i][steps] = decode<kFormat>(p + steps * kLanes * element, tail);
      }
    for (int r = 0; r < num_rows; ++r) {
      const float* input = x + r * x_stride + k;
      Lanes acc[kRows];
      for (int i = 0; i < kRows; ++i) acc[i] = zero();
      for (int64_t s = 0; s < steps; ++s) {
        const Lanes v = load(input + s * kLanes);
        for (int i = 0; i < kRows; ++i)
          acc[i] = fma(num_rows > 1 ? weight[i][s]
                                    : decode<kFormat>(base + i * w.row_stride_bytes +
                                                      (k + s * kLanes) * element),
                       v, acc[i]);
      }
      if (tail) {
        const Lanes v = load(input + steps * kLanes, tail);
        for (int i = 0; i < kRows; ++i)
          acc[i] = fma(num_rows > 1 ? weight[i][steps]
                                    : decode<kFormat>(base + i * w.row_stride_bytes +
                                                          (k + steps * kLanes) * element,
                                                      tail),
                       v, acc[i]);
      }
      for (int i = 0; i < kRows; ++i) total[r][i] = fma(acc[i], scale[i], total[r][i]);
    }
    k = end;
  }
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < kRows; ++i) y[r][row + i] = sum(total[r][i]);
}

template <Format kFormat>
void gemv_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* x,
                 int64_t x_stride, int num_rows, float* const* y) {
  int64_t row = row_begin;
  for (; row + 4 <= row_end; row += 4) gemv_rows<kFormat, 4>(w, row, x, x_stride, num_rows, y);
  for (; row < row_end; ++row) gemv_rows<kFormat, 1>(w, row, x, x_stride, num_rows, y);
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch) {
  float* inputs = static_cast<float*>(scratch);
  const int64_t stride = (w.cols + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < num_rows; ++r) copy_inputs(x[r], w.cols, compute, inputs + r * stride);
  switch (w.format) {
    case Format::kF32: return gemv_format<Format::kF32>(w, row_begin, row_end, inputs, stride, num_rows, y);
    case Format::kBF16: return gemv_format<Format::kBF16>(w, row_begin, row_end, inputs, stride, num_rows, y);
    case Format::kFP8Block:
      return gemv_format<Format::kFP8Block>(w, row_begin, row_end, inputs, stride, num_rows, y);
  }
}

// ---- gemm: a panel of weight rows is decoded and transposed once, then met by all rows of x. ----

constexpr int64_t kPanel = kGemmVectors * kLanes;  // weight rows side by side
constexpr int64_t kDepth = 256;                    // columns packed at a time
constexpr int64_t kChunk = 120;                    // rows of x copied at a time; a multiple of 6

// packed[k][kPanel] = W[row + n][k0 + k] * scale, zeros for rows beyond row_end.
template <Format kFormat>
void pack_panel(const MatrixView& w, int64_t row, int64_t row_end, int64_t k0, int64_t depth,
                float* packed) {
  for (int64_t n = 0; n < kPanel; n += kLanes)
    for (int64_t k = k0; k < k0 + depth;) {
      int64_t end = group_end<kFormat>(w, k);
      end = end < k0 + depth ? end : k0 + depth;
      Lanes scale[kLanes];
      for (int i = 0; i < kLanes; ++i)
        scale[i] = row + n + i < row_end ? broadcast(gain<kFormat>(w, row + n + i, k)) : zero();
      for (; k < end; k += kLanes) {
        const int64_t count = end - k < kLanes ? end - k : kLanes;
        Lanes tile[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          tile[i] = zero();
          if (row + n + i >= row_end) continue;
          const uint8_t* p = w.data + (row + n + i) * w.row_stride_bytes + k * element_bytes(kFormat);
          tile[i] = mul(count == kLanes ? decode<kFormat>(p) : decode<kFormat>(p, count), scale[i]);
        }
        transpose(tile);
        for (int64_t i = 0; i < count; ++i) store(packed + (k - k0 + i) * kPanel + n, tile[i]);
      }
      k = end;
    }
}

template <int kRows>
[[gnu::always_inline]] inline void gemm_block(const float* packed, int64_t depth, const float* x,
                                              float* const* y, int64_t column, int64_t columns,
                                              bool first_depth) {
  Lanes acc[kRows][kGemmVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kGemmVectors; ++v) acc[r][v] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    Lanes weight[kGemmVectors];
    for (int v = 0; v < kGemmVectors; ++v) weight[v] = load(packed + k * kPanel + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Lanes input = broadcast(x[r * kDepth + k]);
      for (int v = 0; v < kGemmVectors; ++v) acc[r][v] = fma(input, weight[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kGemmVectors; ++v) {
      const int64_t left = columns - v * kLanes;
      float* out = y[r] + column + v * kLanes;
      if (left >= kLanes)
        store(out, first_depth ? acc[r][v] : add(acc[r][v], load(out)));
      else if (left > 0)
        store(out, first_depth ? acc[r][v] : add(acc[r][v], load(out, left)), left);
    }
}

template <Format kFormat>
void gemm_format(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
                 const float* const* x, int64_t num_rows, float* const* y, float* scratch) {
  float* packed = scratch;                  // [kDepth][kPanel]
  float* inputs = scratch + kDepth * kPanel;  // [kChunk][kDepth]
  for (int64_t column = row_begin; column < row_end; column += kPanel)
    for (int64_t k0 = 0; k0 < w.cols; k0 += kDepth) {
      const int64_t depth = w.cols - k0 < kDepth ? w.cols - k0 : kDepth;
      pack_panel<kFormat>(w, column, row_end, k0, depth, packed);
      for (int64_t chunk = 0; chunk < num_rows; chunk += kChunk) {
        const int64_t rows = num_rows - chunk < kChunk ? num_rows - chunk : kChunk;
        for (int64_t r = 0; r < rows; ++r)
          copy_inputs(x[chunk + r] + k0, depth, compute, inputs + r * kDepth);
        int64_t r = 0;
        for (; r + kGemmRows <= rows; r += kGemmRows)
          gemm_block<kGemmRows>(packed, depth, inputs + r * kDepth, y + chunk + r, column,
                                row_end - column, k0 == 0);
        for (; r + 2 <= rows; r += 2)
          gemm_block<2>(packed, depth, inputs + r * kDepth, y + chunk + r, column,
                        row_end - column, k0 == 0);
        for (; r < rows; ++r)
          gemm_block<1>(packed, depth, inputs + r * kDepth, y + chunk + r, column,
                        row_end - column, k0 == 0);
      }
    }
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  float* floats = static_cast<float*>(scratch);
  switch (w.format) {
    case Format::kF32: return gemm_format<Format::kF32>(w, row_begin, row_end, compute, x, num_rows, y, floats);
    case Format::kBF16: return gemm_format<Format::kBF16>(w, row_begin, row_end, compute, x, num_rows, y, floats);
    case Format::kFP8Block:
      return gemm_format<Format::kFP8Block>(w, row_begin, row_end, compute, x, num_rows, y, floats);
  }
}

// ---- gemv_transposed: outer products of the natural layout, n in order. ----
// The weight is multiplied by its scale first, as in the reference, so that a column's bits do not
// depend on where the column range was split.

constexpr int64_t kTile = kOuterVectors * kLanes;
constexpr int64_t kInputs = 1024;  // inputs a row copied at a time

// Scales of the columns [col, col + kLanes) in one row of the scale grid.
template <Format kFormat>
[[gnu::always_inline]] inline Lanes column_scales(const MatrixView& w, int64_t row, int64_t col,
                                                  int64_t count) {
  if constexpr (kFormat == Format::kFP8Block) {
    alignas(64) float scales[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) scales[i] = gain<kFormat>(w, row, col + i);
    return load(scales);
  }
  return broadcast(1.0f);
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
  for (int64_t n = n_begin; n < n_end; ++n) {
    if (n == n_begin || (kFormat == Format::kFP8Block && (n + w.row_origin) % w.block_rows == 0))
      for (int v = 0; v < kOuterVectors; ++v)
        scale[v] = column_scales<kFormat>(w, n, col + v * kLanes, left[v]);
    const uint8_t* p = w.data + n * w.row_stride_bytes + col * element_bytes(kFormat);
    Lanes weight[kOuterVectors];
    for (int v = 0; v < kOuterVectors; ++v) {
      const uint8_t* q = p + v * kLanes * element_bytes(kFormat);
      weight[v] = left[v] == kLanes ? decode<kFormat>(q)
                  : left[v] > 0     ? decode<kFormat>(q, left[v])
                                    : zero();
      if (kFormat == Format::kFP8Block) weight[v] = mul(weight[v], scale[v]);
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
  for (; r < num_rows; ++r)
    outer_rows<kFormat, 1>(w, col_begin, col_end, compute, x + r, y + r, inputs);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  float* inputs = static_cast<float*>(scratch);
  switch (w.format) {
    case Format::kF32: return outer_format<Format::kF32>(w, col_begin, col_end, compute, x, num_rows, y, inputs);
    case Format::kBF16: return outer_format<Format::kBF16>(w, col_begin, col_end, compute, x, num_rows, y, inputs);
    case Format::kFP8Block:
      return outer_format<Format::kFP8Block>(w, col_begin, col_end, compute, x, num_rows, y, inputs);
  }
}
