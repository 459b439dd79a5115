// gemv of FP8 weights with float32 FMAs, for 1 to 16 rows: where vdpbf16ps multiplies at half the
// rate of FMA (Intel's processors with AMX), splitting BF16 pairs costs one row nothing and lets
// several rows have the full rate. Per (weight row, row of x): eight FMAs a group into a fresh
// register, times the scale into the total; the same whatever the numbers of rows are.

constexpr int kFmaRows = 4;           // weight rows multiplied together by one row of x,
constexpr int kFmaRowsOfMany = 8;     // by several
constexpr int kFmaInputs = 3;         // rows of x that meet eight weight rows in registers
constexpr int kFmaVectors = kGroup / kLanes;

// Each BF16 of 32 as float32: those of even place, then those of odd place.
[[gnu::always_inline]] inline void split_pairs(__m512i pairs, __m512* out) {
  out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  out[1] = _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// A load that several instructions share: one that each of them repeats would be too many.
[[gnu::always_inline]] inline __m512 in_register(__m512 v) {
  __asm__("" : "+v"(v));
  return v;
}

// 64 columns of a row, of which n are read and zeros stand for the others (n may be below 0).
[[gnu::always_inline]] inline void decode_fp8(const DecoderFP8& decoder, const uint8_t* p,
                                              int64_t n, __m512* out) {
  __m512i pairs[2];
  decoder(p, n < 0 ? 0 : n, pairs);
  split_pairs(pairs[0], out);
  split_pairs(pairs[1], out + 2);
}

// Lane sums of four vectors. The order of a vector's additions does not depend on the others.
[[gnu::always_inline]] inline __m128 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44),
                                        _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters),
                                      _mm512_extractf32x8_ps(quarters, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// y[0, kRows) = the sums of the totals. A NaN's bits depend on the order of an instruction's
// operands, which is the compiler's choice: all become the same one.
template <int kRows>
[[gnu::always_inline]] inline void store_sums(const __m512* total, float* y) {
  for (int i = 0; i < kRows; i += 4) {
    __m128 sums = kRows == 1 ? sum_lanes(total[i], total[i], total[i], total[i])
                             : sum_lanes(total[i], total[i + (kRows > 1)], total[i + 2 * (kRows > 1)],
                                         total[i + 3 * (kRows > 1)]);
    const __mmask8 nan = _mm_cmp_ps_mask(sums, sums, _CMP_UNORD_Q);
    sums = _mm_mask_mov_ps(sums, nan, _mm_set1_ps(__builtin_nanf("")));
    if constexpr (kRows == 1)
      _mm_store_ss(y, sums);
    else
      _mm_storeu_ps(y + i, sums);
  }
}

template <int kRows>
struct FP8Tile {
  const DecoderFP8& decoder;
  const MatrixView& w;
  const int64_t row;
  const float* const x;  // group by group, in each group row by row, kGroup of each
  const int num_rows;
  const float* const scales;  // [kRows], scale_stride apart
  const int64_t scale_stride;
  const uint8_t* const ahead;  // rows to fetch
  const int64_t ahead_stride;

  [[gnu::always_inline]] const uint8_t* at(int i, const Groups& g) const {
    return w.data + (row + i) * w.row_stride_bytes + g.begin;
  }
  template <_mm_hint kHint>
  [[gnu::always_inline]] void fetch(int i, const Groups& g) const {
    const uint8_t* p = ahead + i * ahead_stride + g.begin;
    _mm_prefetch(reinterpret_cast<const char*>(p), kHint);
    _mm_prefetch(reinterpret_cast<const char*>(p + 64), kHint);
  }
  [[gnu::always_inline]] __m512 factor_of(int i, const Groups& g) const {
    return _mm512_set1_ps(scales[i * scale_stride + g.scale_index]);
  }

  // One row of x: weights never leave the registers.
  template <bool kWhole>
  [[gnu::always_inline]] void group(const Groups& g, const float* input, __m512* total) const {
    const int64_t count = kWhole ? kGroup : g.count();
    __m512 acc[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      acc[i] = _mm512_setzero_ps();
      fetch<_MM_HINT_T0>(i, g);
    }
#pragma GCC unroll 2
    for (int64_t col = 0; col < kGroup; col += kBlock) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        __m512 weight[4];
        decode_fp8(decoder, at(i, g) + col, count - col, weight);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
          acc[i] = _mm512_fmadd_ps(weight[v], _mm512_load_ps(input + col + v * kLanes), acc[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) total[i] = _mm512_fmadd_ps(acc[i], factor_of(i, g), total[i]);
  }

  void run(float* const* y) const {
    __m512 total[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) total[i] = _mm512_setzero_ps();
    const float* input = x;
    for (Groups g(w); !g.done(); g.next(), input += kGroup) {
      if (g.count() == kGroup)
        group<true>(g, input, total);
      else
        group<false>(g, input, total);
    }
    store_sums<kRows>(total, y[0] + row);
  }

  using Totals = __m512[kRows];

  template <bool kWhole>
  [[gnu::noinline]] void decode(const Groups& g, __m512 (*weight)[kRows], __m512* factor) const {
    const DecoderFP8 tables = decoder;  // stays in registers
    const int64_t count = kWhole ? kGroup : g.count(), stride = w.row_stride_bytes;
    const uint8_t* p = at(0, g);
    const uint8_t* next = ahead + g.begin;
    const float* scale = scales + g.scale_index;
    for (int i = 0; i < kRows; ++i, p += stride, next += ahead_stride, scale += scale_stride) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(next + kBlock), _MM_HINT_T0);
      factor[i] = _mm512_set1_ps(*scale);
#pragma GCC unroll 2
      for (int64_t block = 0; block < 2; ++block) {
        __m512 decoded[4];
        decode_fp8(tables, p + block * kBlock, count - block * kBlock, decoded);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) weight[4 * block + v][i] = decoded[v];
      }
    }
  }

  // kInputs rows of x and a group's weights [kFmaVectors][kRows].
  template <int kInputs>
  [[gnu::noinline]] static void multiply(const __m512 (*weight)[kRows], const __m512* factor,
                                         const float* input, Totals* total) {
    __m512 acc[kInputs][kRows];
#pragma GCC unroll 8
    for (int v = 0; v < kFmaVectors; ++v) {
      __m512 lane[kInputs];
#pragma GCC unroll 3
      for (int r = 0; r < kInputs; ++r)
        lane[r] = in_register(_mm512_load_ps(input + r * kGroup + v * kLanes));
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512 weights = in_register(weight[v][i]);
#pragma GCC unroll 3
        for (int r = 0; r < kInputs; ++r)
          acc[r][i] = v == 0 ? _mm512_mul_ps(weights, lane[r])
                             : _mm512_fmadd_ps(weights, lane[r], acc[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512 scale = in_register(factor[i]);
#pragma GCC unroll 3
      for (int r = 0; r < kInputs; ++r)
        total[r][i] = _mm512_fmadd_ps(acc[r][i], scale, total[r][i]);
    }
  }

  void run_many(float* const* y) const {
    Totals total[kMaxGemvRows];
    for (int r = 0; r < num_rows; ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const float* input = x;
    for (Groups g(w); !g.done(); g.next()) {
      __m512 weight[kFmaVectors][kRows], factor[kRows];
#ifdef NODEC
      if (g.begin == 0)
#endif
      if (g.count() == kGroup)
        decode<true>(g, weight, factor);
      else
        decode<false>(g, weight, factor);
      int r = 0;
      while (r < num_rows) {
        const int left = num_rows - r;
        const int taken = left == 2 || left == 4 ? 2 : left == 1 ? 1 : 3;
        if (taken == 3)
          multiply<3>(weight, factor, input, total + r);
        else if (taken == 2)
          multiply<2>(weight, factor, input, total + r);
        else
          multiply<1>(weight, factor, input, total + r);
        r += taken;
        input += taken * kGroup;
      }
    }
    for (int r = 0; r < num_rows; ++r) store_sums<kRows>(total[r], y[r] + row);
  }
};

// Whether x, padded to whole groups, is not much longer than it was (KeptInputs::fits).
bool takes_fp8(const MatrixView& w) {
  return w.format == Format::kFP8 && w.col_step == 1 && w.block_cols >= kGroup &&
         (w.block_cols % kGroup == 0 || num_scales(w) <= 4);
}

// Decode class.
void gemv_fp8(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int num_rows, float* const* y, void* memory, KeptInputs* kept) {
  auto* inputs = static_cast<float*>(kept != nullptr ? kept->memory : memory);
  constexpr auto kernel = &gemv_fp8;
  if (kept == nullptr ||
      !kept->ready(w, Compute::kBF16, num_rows, reinterpret_cast<const void*>(kernel))) {
    float* out = inputs;
    for (Groups g(w); !g.done(); g.next())
      for (int r = 0; r < num_rows; ++r, out += kGroup) {
        alignas(64) uint16_t pairs[kGroup];
        prepare_group(w.format, g, x[r], pairs);
        for (int64_t v = 0; v < kVectors; ++v) {
          __m512 lanes[2];
          split_pairs(_mm512_load_si512(pairs + v * 32), lanes);
          _mm512_store_ps(out + 2 * v * kLanes, lanes[0]);
          _mm512_store_ps(out + (2 * v + 1) * kLanes, lanes[1]);
        }
      }
  }
  float* scales = static_cast<float*>(memory) + (kMaxGemvRows + 1) * kMaxColumns;
  const int64_t scale_stride = (num_scales(w) + kLanes - 1) / kLanes * kLanes;
  const DecoderFP8 decoder;
  const auto tile = [&](int64_t row, auto rows) {
    constexpr int kRows = rows.value;
    for (int i = 0; i < kRows; ++i)
      convert_scales(w.scale_type, scale_row(w, row + i), num_scales(w), 1.0f,
                     scales + i * scale_stride);
    const bool last = row + kRows >= row_end && kept != nullptr && kept->next_rows != nullptr;
    const FP8Tile<kRows> rows_of_tile{
        decoder,
        w,
        row,
        inputs,
        num_rows,
        scales,
        scale_stride,
        last ? kept->next_rows : w.data + (row + kRows) * w.row_stride_bytes,
        last ? kept->next_stride_bytes : w.row_stride_bytes};
    if (num_rows == 1) {
      if constexpr (kRows != kFmaRowsOfMany) rows_of_tile.run(y);
    } else {
      if constexpr (kRows != kFmaRows) rows_of_tile.run_many(y);
    }
  };
  int64_t row = row_begin;
  if (num_rows == 1)
    for (; row + kFmaRows <= row_end; row += kFmaRows)
      tile(row, std::integral_constant<int, kFmaRows>{});
  else
    for (; row + kFmaRowsOfMany <= row_end; row += kFmaRowsOfMany)
      tile(row, std::integral_constant<int, kFmaRowsOfMany>{});
  for (; row < row_end; ++row) tile(row, std::integral_constant<int, 1>{});
}
