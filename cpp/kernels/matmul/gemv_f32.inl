// gemv in float32: kRows weight rows at a time; every weight is decoded once for all activation
// rows.
//
// For each (weight row, activation row) the order of operations is the same whatever kRows and
// num_rows are: lanes over k within a group, group sums times scale in k order, then the lanes.
// A row with an FP8 NaN gives NaN whatever it meets, so NaN is looked for a row at a time.

// Rows of activations, and room for the scales of four weight rows.
struct GemvInputs {
  const float* x;  // [num_rows], x_stride apart
  int64_t x_stride;
  int num_rows;
  float* scales;  // [4], scale_stride apart
  int64_t scale_stride;
  // Rows to fetch while the last of the call's are multiplied, or null: those behind.
  const uint8_t* next_rows;
  int64_t next_stride_bytes;
};

template <Format kFormat, int kRows>
struct RowTile {
  static constexpr Scaling kScaling = Decoder<kFormat>::kScaling;
  static constexpr Unit kUnit = unit_of(kFormat);
  static constexpr int64_t kTiles = kGroup / kTile;

  [[gnu::always_inline]] RowTile(const MatrixView& w_, int64_t row_, int64_t row_end,
                                 const GemvInputs& in_)
      : w(w_), row(row_), in(in_) {
    const bool last = row + kRows >= row_end && in.next_rows != nullptr;
    ahead = last ? in.next_rows : w.data + (row + kRows) * w.row_stride_bytes;
    ahead_stride = last ? in.next_stride_bytes : w.row_stride_bytes;
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      data[i] = w.data + (row + i) * w.row_stride_bytes;
      if constexpr (kScaling == Scaling::kGrid)
        convert_scales(w.scale_type, scale_row(w, row + i), num_scales(w), Decoder<kFormat>::kGain,
                       in.scales + i * in.scale_stride);
      if constexpr (kScaling == Scaling::kSubBlocks)
        for (int64_t b = 0; b < w.cols / kUnit.cols; ++b)
          Decoder<kFormat>::scales(data[i] + b * kUnit.bytes,
                                   in.scales + i * in.scale_stride + b * kBlockScales);
    }
  }

  const MatrixView& w;
  const int64_t row;
  const GemvInputs& in;
  const uint8_t* data[kRows];
  const uint8_t* ahead;
  int64_t ahead_stride;
  Lanes total[kMaxGemvRows][kRows];
  NaNProbe probe[kRows];

  [[gnu::always_inline]] Lanes scale(int i, const Groups& g) const {
    if constexpr (kScaling == Scaling::kGrid)
      return broadcast(in.scales[i * in.scale_stride + g.scale_index]);
    if constexpr (kScaling == Scaling::kBlock)
      return broadcast(Decoder<kFormat>::scale(data[i], g.begin));
    return zero();  // not used
  }

  // Tile number t of row i's group, of which n columns count.
  [[gnu::always_inline]] void decode(int i, const Groups& g, int t, int64_t n, Lanes* out) const {
    if constexpr (kScaling == Scaling::kSubBlocks)
      sub_block_tile<kFormat>(data[i], g.begin, t,
                              in.scales + i * in.scale_stride + g.begin / 256 * kBlockScales, out);
    else
      decode_tile<kFormat, false>(data[i], g.begin + t * kTile, n, out);
  }

  // The same bytes of the rows that are next in turn.
  [[gnu::always_inline]] void prefetch(int i, const Groups& g, int64_t count) const {
    const uint8_t* next = ahead + i * ahead_stride + g.begin * kUnit.bytes / kUnit.cols;
    for (int64_t byte = 0; byte < count * kUnit.bytes / kUnit.cols; byte += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next + byte), _MM_HINT_T0);
  }

  // function(tile number, its columns) for the tiles of a group.
  template <int64_t kWhole, typename Function>
  [[gnu::always_inline]] static void for_tiles(int64_t count, const Function& function) {
    if constexpr (kWhole > 0) {
#pragma GCC unroll 4
      for (int t = 0; t < kWhole; ++t) function(t, kTile);
    } else {
      for (int t = 0; t * kTile < count; ++t)
        function(t, count - t * kTile < kTile ? count - t * kTile : kTile);
    }
  }

  // One group: kWhole whole tiles or, with 0, whatever it has. With kSingle (one activation row)
  // the weights never leave the registers.
  template <bool kSingle, int64_t kWhole>
  [[gnu::always_inline]] void group(const Groups& g) {
    const int64_t count = kWhole > 0 ? kWhole * kTile : g.count();
    Lanes factor[kRows], weight[kRows][kTiles * kTileLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      prefetch(i, g, count);
      factor[i] = scale(i, g);
      if constexpr (kFormat == Format::kFP8) probe[i].add(data[i] + g.begin, count);
      if constexpr (!kSingle)
        for_tiles<kWhole>(count, [&](int t, int64_t n) {
          decode(i, g, t, n, weight[i] + t * kTileLanes);
        });
    }
    for (int r = 0; r < (kSingle ? 1 : in.num_rows); ++r) {
      const float* x = in.x + r * in.x_stride + g.begin;
      Lanes acc[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) acc[i] = zero();
      for_tiles<kWhole>(count, [&](int t, int64_t n) {
        Lanes input[kTileLanes];
#pragma GCC unroll 4
        for (int v = 0; v < kTileLanes; ++v) {
          const float* lane = x + t * kTile + v * kLanes;
          input[v] = kWhole > 0 ? load(lane) : load_some(lane, n - v * kLanes);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          Lanes fresh[kTileLanes];
          if constexpr (kSingle) decode(i, g, t, n, fresh);
#pragma GCC unroll 4
          for (int v = 0; v < kTileLanes; ++v)
            acc[i] = fma(kSingle ? fresh[v] : weight[i][t * kTileLanes + v], input[v], acc[i]);
        }
      });
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        total[r][i] = kScaling == Scaling::kGrid || kScaling == Scaling::kBlock
                          ? fma(acc[i], factor[i], total[r][i])
                          : add(acc[i], total[r][i]);
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(float* const* y) {
    for (int r = 0; r < (kSingle ? 1 : in.num_rows); ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) total[r][i] = zero();
    for (Groups g(w); !g.done(); g.next()) {
      if constexpr (kScaling == Scaling::kBlock) {
        group<kSingle, 1>(g);
      } else {
        if (g.count() == kGroup)
          group<kSingle, kTiles>(g);
        else if (kScaling == Scaling::kGrid && g.count() == kTile)
          group<kSingle, 1>(g);
        else
          group<kSingle, 0>(g);
      }
    }
    for (int r = 0; r < (kSingle ? 1 : in.num_rows); ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        y[r][row + i] = probe[i].found() ? __builtin_nanf("") : sum(total[r][i]);
  }
};

// Every weight row on its own meets one row of activations after the other when it is among the
// last three: they are few, and the code is large.
template <Format kFormat>
void gemv_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const GemvInputs& in,
                 float* const* y) {
  int64_t row = row_begin;
  for (; row + 4 <= row_end; row += 4) {
    RowTile<kFormat, 4> tile(w, row, row_end, in);
    if (in.num_rows == 1)
      tile.template run<true>(y);
    else
      tile.template run<false>(y);
  }
  for (; row < row_end; ++row)
    for (int r = 0; r < in.num_rows; ++r) {
      GemvInputs one = in;
      one.x += r * in.x_stride;
      one.num_rows = 1;
      RowTile<kFormat, 1>(w, row, row_end, one).template run<true>(y + r);
    }
}

// Matrices whose rows no decoder takes: four rows at a time become float32 first.
void gemv_values(const MatrixView& w, int64_t row_begin, int64_t row_end, const GemvInputs& in,
                 float* const* y, float* values) {
  MatrixView rows;
  rows.data = reinterpret_cast<const uint8_t*>(values);
  rows.cols = w.cols;
  const int64_t stride = (w.cols + kTile - 1) / kTile * kTile;
  rows.row_stride_bytes = 4 * stride;
  for (int64_t row = row_begin; row < row_end; row += 4) {
    rows.rows = row_end - row < 4 ? row_end - row : 4;
    load_rows(w, row, row + rows.rows, Span(w, 0, w.cols), stride, values);
    float* outputs[kMaxGemvRows];
    for (int r = 0; r < in.num_rows; ++r) outputs[r] = y[r] + row;
    gemv_format<Format::kF32>(rows, 0, rows.rows, in, outputs);
  }
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch, KeptInputs* kept) {
  float* inputs = static_cast<float*>(kept != nullptr ? kept->memory : scratch);
  const int64_t stride = (w.cols + kLanes - 1) / kLanes * kLanes;
  if (kept == nullptr || !kept->ready(w, compute, num_rows, reinterpret_cast<const void*>(&gemv)))
    for (int r = 0; r < num_rows; ++r) copy_inputs(x[r], w.cols, compute, inputs + r * stride);
  float* rest = static_cast<float*>(scratch) + (kept != nullptr ? 0 : num_rows * stride);
  const bool sub_blocks = unit_of(w.format).cols == 256;
  const int64_t scales = sub_blocks ? w.cols / 256 * kBlockScales : num_scales(w);
  const int64_t scale_stride = (scales + kLanes - 1) / kLanes * kLanes;
  const GemvInputs in{inputs,
                      stride,
                      num_rows,
                      rest,
                      scale_stride,
                      kept != nullptr ? kept->next_rows : nullptr,
                      kept != nullptr ? kept->next_stride_bytes : 0};
  if (w.col_step != 1 || w.format == Format::kAWQ || w.format == Format::kGPTQ)
    return gemv_values(w, row_begin, row_end, in, y, rest);
  for_format(w.format, [&](auto format) {
    if constexpr (Decoder<format.value>::kScaling != Scaling::kColumn)
      gemv_format<format.value>(w, row_begin, row_end, in, y);
  });
}
