// gemv in float32: kRows weight rows at a time; every weight is decoded once for all activation
// rows.
//
// For each (weight row, activation row) the order of operations is the same whatever kRows and
// num_rows are: lanes over k within a group, group sums times scale in k order, then the lanes.
// A row with an FP8 NaN gives NaN whatever it meets, so NaN is looked for a row at a time.

template <Format kFormat, int kRows>
struct RowTile {
  static constexpr int64_t kElement =
      kFormat == Format::kF32 ? 4 : kFormat == Format::kBF16 ? 2 : 1;
  static constexpr int kSteps = kGroup / kLanes;

  [[gnu::always_inline]] RowTile(const MatrixView& w_, int64_t row_, const float* x_,
                                 int64_t x_stride_, int num_rows_)
      : w(w_), row(row_), x(x_), x_stride(x_stride_), num_rows(num_rows_) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) scales[i] = scale_row(w, row + i);
  }

  const MatrixView& w;
  const int64_t row;
  const float* const x;  // [num_rows] rows, x_stride apart
  const int64_t x_stride;
  const int num_rows;
  const uint8_t* scales[kRows];
  Lanes total[kMaxGemvRows][kRows];
  NaNProbe probe[kRows];

  // One group; with kFull it has kGroup columns. With kSingle (one activation row) the weights
  // never leave the registers.
  template <bool kSingle, bool kFull>
  [[gnu::always_inline]] void group(const Groups& g) {
    const uint8_t* p = w.data + row * w.row_stride_bytes + g.begin * kElement;
    const int64_t steps = kFull ? kSteps : g.count() / kLanes;
    const int64_t tail = kFull ? 0 : g.count() % kLanes;
    Lanes scale[kRows], weight[kRows][kSteps + 1];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* q = p + i * w.row_stride_bytes;
#pragma GCC unroll 8
      for (int64_t byte = 0; byte < kGroup * kElement; byte += 64)
        _mm_prefetch(reinterpret_cast<const char*>(q + kRows * w.row_stride_bytes + byte),
                     _MM_HINT_T0);
      scale[i] = broadcast(gain<kFormat>(scales[i], g.scale_col));
      if constexpr (kFormat == Format::kFP8) probe[i].add(q, kFull ? kGroup : g.count());
      if constexpr (kSingle) continue;
      for (int64_t s = 0; s < steps; ++s)
        weight[i][s] = decode<kFormat, false>(q + s * kLanes * kElement);
      if (tail > 0) weight[i][steps] = decode<kFormat, false>(q + steps * kLanes * kElement, tail);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r) {
      const float* input = x + r * x_stride + g.begin;
      Lanes acc[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) acc[i] = zero();
      for (int64_t s = 0; s < steps; ++s) {
        const Lanes v = load(input + s * kLanes);
        const uint8_t* q = p + s * kLanes * kElement;
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          acc[i] = fma(kSingle ? decode<kFormat, false>(q + i * w.row_stride_bytes) : weight[i][s],
                       v, acc[i]);
      }
      if (tail > 0) {
        const Lanes v = load(input + steps * kLanes, tail);
        const uint8_t* q = p + steps * kLanes * kElement;
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          acc[i] = fma(kSingle ? decode<kFormat, false>(q + i * w.row_stride_bytes, tail)
                               : weight[i][steps],
                       v, acc[i]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) total[r][i] = fma(acc[i], scale[i], total[r][i]);
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(float* const* y) {
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) total[r][i] = zero();
    for (Groups g(w); !g.done(); g.next()) {
      if (g.count() == kGroup)
        group<kSingle, true>(g);
      else
        group<kSingle, false>(g);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        y[r][row + i] = probe[i].found() ? __builtin_nanf("") : sum(total[r][i]);
  }
};

template <Format kFormat, int kRows>
[[gnu::always_inline]] inline void gemv_rows(const MatrixView& w, int64_t row, const float* x,
                                             int64_t x_stride, int num_rows, float* const* y) {
  RowTile<kFormat, kRows> tile(w, row, x, x_stride, num_rows);
  if (num_rows == 1)
    tile.template run<true>(y);
  else
    tile.template run<false>(y);
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
  if (!vectorised(w)) return kMatmulRef.gemv(w, row_begin, row_end, compute, x, num_rows, y, scratch);
  float* inputs = static_cast<float*>(scratch);
  const int64_t stride = (w.cols + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < num_rows; ++r) copy_inputs(x[r], w.cols, compute, inputs + r * stride);
  switch (w.format) {
    case Format::kF32:
      return gemv_format<Format::kF32>(w, row_begin, row_end, inputs, stride, num_rows, y);
    case Format::kBF16:
      return gemv_format<Format::kBF16>(w, row_begin, row_end, inputs, stride, num_rows, y);
    case Format::kFP8:
      return gemv_format<Format::kFP8>(w, row_begin, row_end, inputs, stride, num_rows, y);
    default: return;
  }
}
