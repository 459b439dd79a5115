// AVX-512 with BF16 and VBMI: gemv straight from FP8 and BF16 bytes with vdpbf16ps; the rest as
// plain AVX-512, for float32 FMA does at least as many multiplications a cycle on most CPUs (twice
// as many on Sapphire and Granite Rapids).
#include <immintrin.h>

#include "kernels/matmul/decoders_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int kRowsTogether = 4;

// Four weight rows (or one) against all activation rows. Per (weight row, activation row): up to
// four vdpbf16ps a group into a fresh register, times the scale into the total; the same whatever
// kRows and num_rows are. With kSingle (one activation row) the weights never leave the registers.
template <typename Decoder, int kRows>
struct RowTile {
  static constexpr int64_t kElement = Decoder::kFormat == Format::kFP8 ? 1 : 2;

  [[gnu::always_inline]] RowTile(const Decoder& decoder_, const MatrixView& w_, int64_t row_,
                                 const uint16_t* x_, int num_rows_)
      : decoder(decoder_), w(w_), row(row_), x(x_), num_rows(num_rows_) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) scales[i] = scale_row(w, row + i);
  }

  const Decoder& decoder;
  const MatrixView& w;
  const int64_t row;
  const uint16_t* const x;
  const int num_rows;
  const uint8_t* scales[kRows];
  __m512 total[kMaxGemvRows][kRows];

  // One group of `count` columns whose inputs start at `input`; kVectorsUsed is 4, or 2 when
  // count <= kBlock.
  template <bool kSingle, int kVectorsUsed>
  [[gnu::always_inline]] void group(const Groups& g, int64_t count, const uint16_t* input) {
    const uint8_t* p = w.data + row * w.row_stride_bytes + g.begin * kElement;
    __m512i weight[kRows][kVectorsUsed];
    __m512 scale[kRows], acc[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* q = p + i * w.row_stride_bytes;
      _mm_prefetch(reinterpret_cast<const char*>(q + kRows * w.row_stride_bytes), _MM_HINT_T0);
      decoder(q, count, weight[i]);
      if constexpr (kVectorsUsed > 2) {
        _mm_prefetch(reinterpret_cast<const char*>(q + kRows * w.row_stride_bytes + 64),
                     _MM_HINT_T0);
        decoder(q + kBlock * kElement, count - kBlock, weight[i] + 2);
      }
      scale[i] = _mm512_set1_ps(
          Decoder::kFormat == Format::kFP8 ? load_f32(scales[i] + 4 * g.scale_index) : 1.0f);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r, input += kGroup) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsUsed; ++v) {
        const __m512bh inputs = (__m512bh)_mm512_loadu_si512(input + v * 32);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)weight[i][v], inputs);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_fmadd_ps(acc[i], scale[i], total[r][i]);
    }
  }

  template <bool kSingle>
  [[gnu::always_inline]] void run(float* const* y) {
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const uint16_t* input = x;
    for (Groups g(w); !g.done(); g.next(), input += num_rows * kGroup) {
      if (g.count() == kGroup)
        group<kSingle, 4>(g, kGroup, input);
      else if (g.count() > kBlock)
        group<kSingle, 4>(g, g.count(), input);
      else
        group<kSingle, 2>(g, g.count(), input);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
  }
};

template <typename Decoder, int kRows>
[[gnu::always_inline]] inline void gemv_rows(const Decoder& decoder, const MatrixView& w,
                                             int64_t row, const uint16_t* x, int num_rows,
                                             float* const* y) {
  RowTile<Decoder, kRows> tile(decoder, w, row, x, num_rows);
  if (num_rows == 1)
    tile.template run<true>(y);
  else
    tile.template run<false>(y);
}

template <typename Decoder>
void gemv_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                 int num_rows, float* const* y, uint16_t* inputs) {
  uint16_t* input = inputs;  // group by group, in each group row by row
  for (Groups g(w); !g.done(); g.next())
    for (int r = 0; r < num_rows; ++r, input += kGroup) prepare_group(w.format, g, x[r], input);
  const Decoder decoder;
  int64_t row = row_begin;
  for (; row + kRowsTogether <= row_end; row += kRowsTogether)
    gemv_rows<Decoder, kRowsTogether>(decoder, w, row, inputs, num_rows, y);
  for (; row < row_end; ++row)
    gemv_rows<Decoder, 1>(decoder, w, row, inputs, num_rows, y);
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch) {
  auto* inputs = static_cast<uint16_t*>(scratch);
  // Blocks narrower than a group would need more padding than the scratch has.
  const bool narrow = w.format == Format::kFP8 && w.block_cols < kGroup;
  const bool here = w.format == Format::kBF16 ||
                    (w.format == Format::kFP8 && w.scale_type == ScaleType::kF32);
  if (compute == Compute::kExact || !here || w.col_step != 1 || narrow)
    kMatmulAvx512.gemv(w, row_begin, row_end, compute, x, num_rows, y, scratch);
  else if (w.format == Format::kFP8)
    gemv_format<DecoderFP8>(w, row_begin, row_end, x, num_rows, y, inputs);
  else
    gemv_format<DecoderBF16>(w, row_begin, row_end, x, num_rows, y, inputs);
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (num_rows <= kMaxGemvRows)
    gemv(w, row_begin, row_end, compute, x, static_cast<int>(num_rows), y, scratch);
  else
    kMatmulAvx512.gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  kMatmulAvx512.gemv_transposed(w, col_begin, col_end, compute, x, num_rows, y, scratch);
}

}  // namespace matmul_avx512bf16

const MatmulKernels kMatmulAvx512bf16 = {matmul_avx512bf16::gemv, matmul_avx512bf16::gemm,
                                         matmul_avx512bf16::gemv_transposed};

}  // namespace moechat
