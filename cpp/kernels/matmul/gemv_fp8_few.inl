// gemv of FP8 weights with float32 FMAs, for so few rows of x that tiles cost more than they save
// (gemv_fp8_amx.inl). Both give the same bits, for both add in this order:
//
// A group's columns are 16 lanes of four pairs. Per lane, the products of even columns are summed
// in the order of the pairs by FMA, those of odd columns apart, and then the two sums are added:
// so tdpbf16ps does when a tile is as narrow as four pairs. Lanes j, 4 + j, 8 + j, 12 + j are added
// in this order (on tiles: into tile j), and the result times the group's scale goes into total j.
// In the end the four totals are added. tdpbf16ps flushes denormal results, so until the sums are
// scaled FMAs are told to. Neither meets denormal inputs: rounding to BF16 flushes those of x, and
// FP8 has none.
//
// vdpbf16ps does a multiplication in twice the time of an FMA on the processors with AMX.

constexpr int kTotals = 4;
constexpr int kFewInputs = 3;  // rows of x, at most
constexpr int kFewRows = 4;    // weight rows together
constexpr int kFewGroups = 8;  // groups whose sums are scaled together

// Denormal results become zero while this lives.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

// A NaN's bits depend on the order of operands: all become the same one.
[[gnu::always_inline]] inline __m512 same_nans(__m512 v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                            _mm512_set1_ps(__builtin_nanf("")));
}

// A group as four registers of 32 BF16: pair v of lane l is word l of register v. `count` columns
// are read, zeros stand for the others.
[[gnu::always_inline]] inline void decode_group(const DecoderFP8& decoder, const uint8_t* p,
                                                int64_t count, __m512i* out) {
  decoder(p, count, out);
  decoder(p + kBlock, count < kBlock ? 0 : count - kBlock, out + 2);
}

[[gnu::always_inline]] inline __m512 even_columns(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
[[gnu::always_inline]] inline __m512 odd_columns(__m512i pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// What a call's weight rows share. Scales are those of the rows multiplied together: [group][row].
struct FP8Call {
  const MatrixView& w;
  const void* inputs;
  int num_rows;
  float* const* y;
  const float* scales;
};

// Weight rows multiplied together, and those to fetch meanwhile.
struct FP8Rows {
  int64_t row, rows;
  const uint8_t* ahead;
  int64_t ahead_stride;
};

// x group by group, in each row by row: of each register of pairs even and odd columns, as float32.
void pack_few(const MatrixView& w, const float* const* x, int num_rows, float* out) {
  for (Groups g(w); !g.done(); g.next())
    for (int r = 0; r < num_rows; ++r, out += kGroup) {
      alignas(64) uint16_t pairs[kGroup];
      prepare_group(w.format, g, x[r], pairs);
      for (int v = 0; v < kVectors; ++v) {
        const __m512i both = _mm512_load_si512(pairs + 32 * v);
        _mm512_store_ps(out + 32 * v, even_columns(both));
        _mm512_store_ps(out + 32 * v + 16, odd_columns(both));
      }
    }
}

// Of the lanes of four weight rows the four sums that go into totals: row i's in words 4 i on.
[[gnu::always_inline]] inline __m512 sum_quarters(const __m512* rows) {
  const __m512 low01 = _mm512_shuffle_f32x4(rows[0], rows[1], 0x44);
  const __m512 low23 = _mm512_shuffle_f32x4(rows[2], rows[3], 0x44);
  const __m512 high01 = _mm512_shuffle_f32x4(rows[0], rows[1], 0xee);
  const __m512 high23 = _mm512_shuffle_f32x4(rows[2], rows[3], 0xee);
  __m512 sums = _mm512_setzero_ps();  // tiles begin with +0 as well
  sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(low01, low23, 0x88));
  sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(low01, low23, 0xdd));
  sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(high01, high23, 0x88));
  return _mm512_add_ps(sums, _mm512_shuffle_f32x4(high01, high23, 0xdd));
}

// Up to four weight rows, filled up with the last one, by kInputs rows of x.
template <int kInputs>
struct FP8Few {
  const FP8Call& call;
  const FP8Rows& rows;
  const DecoderFP8 decoder;
  const uint8_t* data[kFewRows];

  struct Sums {
    int64_t scale_index;
    __m512 of_rows[kInputs];
  };

  // Sums of a group, unscaled.
  template <bool kWhole>
  [[gnu::always_inline]] void group(const Groups& g, const float* x, Sums& out) const {
    __m512 sum[kInputs][kFewRows];
#pragma GCC unroll 4
    for (int i = 0; i < kFewRows; ++i) {
      const uint8_t* ahead = rows.ahead + i * rows.ahead_stride + g.begin;
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + kBlock), _MM_HINT_T0);
      __m512i pairs[kVectors];
      decode_group(decoder, data[i] + g.begin, kWhole ? kGroup : g.count(), pairs);
      __m512 even[kInputs], odd[kInputs];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m512 even_weights = even_columns(pairs[v]), odd_weights = odd_columns(pairs[v]);
#pragma GCC unroll 3
        for (int r = 0; r < kInputs; ++r) {
          const __m512 even_x = _mm512_load_ps(x + r * kGroup + 32 * v);
          const __m512 odd_x = _mm512_load_ps(x + r * kGroup + 32 * v + 16);
          even[r] = v == 0 ? _mm512_mul_ps(even_weights, even_x)
                           : _mm512_fmadd_ps(even_weights, even_x, even[r]);
          odd[r] = v == 0 ? _mm512_mul_ps(odd_weights, odd_x)
                          : _mm512_fmadd_ps(odd_weights, odd_x, odd[r]);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < kInputs; ++r) sum[r][i] = _mm512_add_ps(even[r], odd[r]);
    }
    out.scale_index = g.scale_index;
#pragma GCC unroll 3
    for (int r = 0; r < kInputs; ++r) out.of_rows[r] = sum_quarters(sum[r]);
  }

  // The sums of the next groups; not inlined, so that nothing leaves the scope of FlushDenormals.
  [[gnu::noinline]] int next_groups(Groups& g, const float* x, Sums* out) const {
    const FlushDenormals flush;
    int count = 0;
    for (; count < kFewGroups && !g.done(); ++count, g.next(), x += kInputs * kGroup) {
      if (g.count() == kGroup)
        group<true>(g, x, out[count]);
      else
        group<false>(g, x, out[count]);
    }
    return count;
  }

  void run() {
    for (int64_t i = 0; i < kFewRows; ++i)
      data[i] = call.w.data +
                (rows.row + (i < rows.rows ? i : rows.rows - 1)) * call.w.row_stride_bytes;
    __m512 total[kInputs];
    for (__m512& t : total) t = _mm512_setzero_ps();
    const auto* x = static_cast<const float*>(call.inputs);
    const __m512i row_of_word = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    for (Groups g(call.w); !g.done();) {
      Sums sums[kFewGroups];
      const int count = next_groups(g, x, sums);
      x += count * kInputs * kGroup;
      for (int k = 0; k < count; ++k) {
        const __m128 scales = _mm_load_ps(call.scales + kFewRows * sums[k].scale_index);
        const __m512 factor = _mm512_permutexvar_ps(row_of_word, _mm512_castps128_ps512(scales));
#pragma GCC unroll 3
        for (int r = 0; r < kInputs; ++r)
          total[r] = _mm512_fmadd_ps(sums[k].of_rows[r], factor, total[r]);
      }
    }
    for (int r = 0; r < kInputs; ++r) {
      const __m512 halves = _mm512_add_ps(total[r], _mm512_permute_ps(total[r], 0xb1));
      alignas(64) float words[kLanes];
      _mm512_store_ps(words, same_nans(_mm512_add_ps(halves, _mm512_permute_ps(halves, 0x4e))));
      for (int64_t i = 0; i < rows.rows; ++i) call.y[r][rows.row + i] = words[4 * i];
    }
  }
};
