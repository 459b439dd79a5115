// gemv of FP8 weights with tdpbf16ps, for 4 to 16 rows of x at about twice the cost of one; and the
// choice between it and gemv_fp8_few.inl, which says in what order both add. Weights are decoded to
// the first cache, a group of 16 weight rows at a time, as tiles [16 weight rows][4 pairs], one a
// lane.

constexpr int64_t kGroupLanes = kGroup / 8;  // of four pairs
constexpr int64_t kGroupBytes = 2 * kGroup;  // as BF16
constexpr int64_t kLaneBytes = kGroupBytes / kGroupLanes;

// x of several rows, group by group: for each lane a tile [4 pairs][num_rows][2].
void pack_many(const MatrixView& w, const float* const* x, int num_rows, uint16_t* out) {
  for (Groups g(w); !g.done(); g.next(), out += kGroup * num_rows)
    for (int r = 0; r < num_rows; ++r) {
      alignas(64) uint16_t pairs[kGroup];
      prepare_group(w.format, g, x[r], pairs);
      for (int64_t lane = 0; lane < kGroupLanes; ++lane)
        for (int64_t v = 0; v < kVectors; ++v)
          std::memcpy(out + ((lane * kVectors + v) * num_rows + r) * 2,
                      pairs + v * 32 + lane * 2, 4);
    }
}

struct FP8Scratch {
  alignas(64) uint8_t weights[2][kTileRows * kGroupBytes];  // of this group and the next
  alignas(64) float sums[2][kTotals][kTileRows * kMaxGemvRows];  // [weight row][row of x]
  alignas(64) float totals[kTotals][kTileRows * kMaxGemvRows];
  alignas(64) int32_t row_of_word[kTileRows * kMaxGemvRows];  // of sums
};

// Tile registers 0-3: sums, 4-5: weights, 6-7: x. Configured while this lives.
class FP8Registers {
 public:
  explicit FP8Registers(int num_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile)
      config.row_bytes[tile] = static_cast<uint16_t>(4 * num_rows);
    config.row_bytes[4] = config.row_bytes[5] = kLaneBytes;
    config.rows[6] = config.rows[7] = kVectors;
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC thinks that eight bytes are read
    _tile_loadconfig(&config);
  }
  ~FP8Registers() { _tile_release(); }
  FP8Registers(const FP8Registers&) = delete;
  FP8Registers& operator=(const FP8Registers&) = delete;
};

// Up to 16 weight rows by several rows of x. What is under way at a time: the products of a group,
// decoding of the next, scaling of the one before.
struct FP8Many {
  const FP8Call& call;
  const FP8Rows& rows;
  FP8Scratch& scratch;
  const DecoderFP8 decoder;

  // Lane by lane: 16 bytes each, those of register q of lanes q, 4 + q, 8 + q, 12 + q.
  template <bool kWhole>
  [[gnu::always_inline]] static void decode_row(const DecoderFP8& tables, const uint8_t* p,
                                                int64_t count, uint8_t* out) {
    __m512i pairs[kVectors];
    decode_group(tables, p, kWhole ? kGroup : count, pairs);
    const __m512i low01 = _mm512_unpacklo_epi32(pairs[0], pairs[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(pairs[2], pairs[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(pairs[0], pairs[1]);
    const __m512i high23 = _mm512_unpackhi_epi32(pairs[2], pairs[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(out + 128, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(out + 192, _mm512_unpackhi_epi64(high01, high23));
  }

  // A group's products into the tiles of sums; meanwhile the group of `count` columns at p is
  // decoded to `next`, a row a lane, and what is ahead fetched.
  template <bool kWhole>
  [[gnu::always_inline]] void multiply(const uint8_t* weights, const uint16_t* x, const uint8_t* p,
                                       const uint8_t* ahead, int64_t count, uint8_t* next) const {
    const DecoderFP8 tables = decoder.in_registers();
    const int64_t x_stride = 4 * call.num_rows, lane_size = 8 * call.num_rows;
    const int64_t stride = call.w.row_stride_bytes, ahead_stride = rows.ahead_stride;
    const uint8_t* const last = p + (rows.rows - 1) * stride;
    const auto step = [&]() __attribute__((always_inline)) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + kBlock), _MM_HINT_T0);
      decode_row<kWhole>(tables, p, count, next);
      p = p == last ? p : p + stride;  // rows that are not there: the last one again
      ahead += ahead_stride;
      next += kGroupBytes;
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t lane = 0; lane < kGroupLanes; lane += 4) {
      __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
      _tile_loadd(4, weights, kGroupBytes);
      _tile_loadd(6, x, x_stride);
      _tile_dpbf16ps(0, 4, 6);
      step();
      _tile_loadd(5, weights + 64, kGroupBytes);
      _tile_loadd(7, x + lane_size, x_stride);
      _tile_dpbf16ps(1, 5, 7);
      step();
      _tile_loadd(4, weights + 128, kGroupBytes);
      _tile_loadd(6, x + 2 * lane_size, x_stride);
      _tile_dpbf16ps(2, 4, 6);
      step();
      _tile_loadd(5, weights + 192, kGroupBytes);
      _tile_loadd(7, x + 3 * lane_size, x_stride);
      _tile_dpbf16ps(3, 5, 7);
      step();
      weights += kLaneBytes;
      x += 4 * lane_size;
    }
    __asm__ volatile("" ::: "memory");
  }

  [[gnu::always_inline]] void scale(int64_t index, const float (*sums)[kTileRows * kMaxGemvRows]) {
    const __m512 scales = _mm512_load_ps(call.scales + kTileRows * index);
    for (int64_t word = 0; word < kTileRows * call.num_rows; word += kLanes) {
      const __m512 factor =
          _mm512_permutexvar_ps(_mm512_load_si512(scratch.row_of_word + word), scales);
#pragma GCC unroll 4
      for (int j = 0; j < kTotals; ++j) {
        float* total = scratch.totals[j] + word;
        _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(sums[j] + word), factor,
                                               _mm512_load_ps(total)));
      }
    }
  }

  void run() {
    const int64_t stride = call.w.row_stride_bytes;
    const uint8_t* data = call.w.data + rows.row * stride;
    for (auto& total : scratch.totals) std::memset(total, 0, sizeof total);
    Groups g(call.w);
    for (int64_t i = 0; i < kTileRows; ++i)
      decode_row<false>(decoder, data + (i < rows.rows ? i : rows.rows - 1) * stride, g.count(),
                        scratch.weights[0] + i * kGroupBytes);
    const auto* x = static_cast<const uint16_t*>(call.inputs);
    const int64_t x_stride = 4 * call.num_rows;
    int64_t scaled = -1;  // index of the scales of the group before
    for (int now = 0; !g.done(); now ^= 1, x += kGroup * call.num_rows) {
      const int64_t scale_index = g.scale_index;
      g.next();
      const uint8_t* weights = scratch.weights[now];
      uint8_t* next = scratch.weights[now ^ 1];
      const int64_t begin = g.done() ? 0 : g.begin;  // the last group decodes in vain
      if (g.count() == kGroup)
        multiply<true>(weights, x, data + begin, rows.ahead + begin, kGroup, next);
      else
        multiply<false>(weights, x, data + begin, rows.ahead + begin, g.count(), next);
      if (scaled >= 0) scale(scaled, scratch.sums[now ^ 1]);
      scaled = scale_index;
      _tile_stored(0, scratch.sums[now][0], x_stride);
      _tile_stored(1, scratch.sums[now][1], x_stride);
      _tile_stored(2, scratch.sums[now][2], x_stride);
      _tile_stored(3, scratch.sums[now][3], x_stride);
      __asm__ volatile("" ::: "memory");
      if (g.done()) scale(scaled, scratch.sums[now]);
    }
    float* sum = scratch.totals[0];
    for (int64_t word = 0; word < kTileRows * call.num_rows; word += kLanes) {
      const auto total = [&](int j) { return _mm512_load_ps(scratch.totals[j] + word); };
      _mm512_store_ps(sum + word, same_nans(_mm512_add_ps(_mm512_add_ps(total(0), total(1)),
                                                          _mm512_add_ps(total(2), total(3)))));
    }
    for (int r = 0; r < call.num_rows; ++r)
      for (int64_t i = 0; i < rows.rows; ++i)
        call.y[r][rows.row + i] = sum[i * call.num_rows + r];
  }
};

// Whether x, padded to whole groups, is not much longer than it was (KeptInputs::fits).
bool takes_fp8(const MatrixView& w) {
  return w.format == Format::kFP8 && w.col_step == 1 && w.block_cols >= kGroup &&
         (w.block_cols % kGroup == 0 || num_scales(w) <= 4);
}

// Scales of weight rows as [group of columns][kRows]: of rows that are not there, the last's.
template <int64_t kRows>
class RowScales {
 public:
  RowScales(const MatrixView& w, float* memory)
      : w_(w), count_(num_scales(w)), row_(memory), out_(memory + kMaxColumns) {}
  const float* get() const { return out_; }

  void load(int64_t row, int64_t rows) {
    const uint8_t* first = scale_row(w_, row);
    const bool same = first == scale_row(w_, row + rows - 1);
    if (same && first == held_) return;  // most often
    held_ = same ? first : nullptr;
    for (int64_t i = 0; i < kRows; ++i) {
      if (i == 0 || (i < rows && !same))
        convert_scales(w_.scale_type, scale_row(w_, row + i), count_, 1.0f, row_);
      for (int64_t k = 0; k < count_; ++k) out_[k * kRows + i] = row_[k];
    }
  }

 private:
  const MatrixView& w_;
  const int64_t count_;
  float* const row_;
  float* const out_;
  const uint8_t* held_ = nullptr;  // the row of the grid that all are of
};

// Up to `together` rows from `row` on; the next as many are fetched, or those the caller expects.
FP8Rows rows_from(const MatrixView& w, int64_t row, int64_t row_end, int64_t together,
                  const KeptInputs* kept) {
  const int64_t rows = row_end - row < together ? row_end - row : together;
  if (row + together >= row_end && kept != nullptr && kept->next_rows != nullptr)
    return {row, rows, kept->next_rows, kept->next_stride_bytes};
  return {row, rows, w.data + (row + together) * w.row_stride_bytes, w.row_stride_bytes};
}

template <int kInputs>
void gemv_fp8_few(const MatrixView& w, int64_t row_begin, int64_t row_end, const void* inputs,
                  float* const* y, float* memory, const KeptInputs* kept) {
  RowScales<kFewRows> scales(w, memory);
  const FP8Call call{w, inputs, kInputs, y, scales.get()};
  for (int64_t row = row_begin; row < row_end; row += kFewRows) {
    const FP8Rows rows = rows_from(w, row, row_end, kFewRows, kept);
    scales.load(row, rows.rows);
    FP8Few<kInputs>{call, rows, {}, {}}.run();
  }
}

void gemv_fp8_many(const MatrixView& w, int64_t row_begin, int64_t row_end, const void* inputs,
                   int num_rows, float* const* y, float* memory, const KeptInputs* kept) {
  FP8Scratch scratch;
  for (int32_t word = 0; word < kTileRows * num_rows; ++word)
    scratch.row_of_word[word] = word / num_rows;
  RowScales<kTileRows> scales(w, memory);
  const FP8Call call{w, inputs, num_rows, y, scales.get()};
  const FP8Registers registers(num_rows);
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const FP8Rows rows = rows_from(w, row, row_end, kTileRows, kept);
    scales.load(row, rows.rows);
    FP8Many{call, rows, scratch, {}}.run();
  }
}

// Decode class.
void gemv_fp8(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int num_rows, float* const* y, void* memory, KeptInputs* kept) {
  void* inputs = kept != nullptr ? kept->memory : memory;
  constexpr auto kernel = &gemv_fp8;
  if (kept == nullptr ||
      !kept->ready(w, Compute::kBF16, num_rows, reinterpret_cast<const void*>(kernel))) {
    if (num_rows <= kFewInputs)
      pack_few(w, x, num_rows, static_cast<float*>(inputs));
    else
      pack_many(w, x, num_rows, static_cast<uint16_t*>(inputs));
  }
  float* rest = static_cast<float*>(memory) + (kMaxGemvRows + 1) * kMaxColumns;
  static_assert(kFewInputs == 3);
  switch (num_rows) {
    case 1: return gemv_fp8_few<1>(w, row_begin, row_end, inputs, y, rest, kept);
    case 2: return gemv_fp8_few<2>(w, row_begin, row_end, inputs, y, rest, kept);
    case 3: return gemv_fp8_few<3>(w, row_begin, row_end, inputs, y, rest, kept);
    default: return gemv_fp8_many(w, row_begin, row_end, inputs, num_rows, y, rest, kept);
  }
}
