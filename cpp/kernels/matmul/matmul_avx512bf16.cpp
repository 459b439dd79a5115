// AVX-512 with BF16 and VBMI: gemv straight from FP8, BF16 and 4-bit bytes with vdpbf16ps, gemm of
// what gemm_bf16.inl takes likewise; the rest as plain AVX-512.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "kernels/matmul/decoders_avx512bf16.h"
#include "kernels/matmul/gemm_avx512bf16.h"
#include "kernels/matmul/gemv_k_quants_avx512bf16.h"
#include "kernels/matmul/gemv_nibbles_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx512.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/next_rows.h"

namespace moechat {
namespace matmul_avx512bf16 {

using namespace matmul_avx512;
#include "kernels/matmul/inputs_f32.inl"

constexpr int kRowsTogether = 4;

// Four weight rows (or one) against all activation rows. Per (weight row, activation row): up to
// four vdpbf16ps a group into a fresh register, times the scale into the total; the same whatever
// kRows and num_rows are. With kSingle (one activation row) the weights never leave the registers.
template <typename Decoder, int kRows>
struct RowTile {
  static constexpr int64_t kElement = Decoder::kFormat == Format::kFP8 ? 1 : 2;

  const Decoder& decoder;
  const MatrixView& w;
  const int64_t row;
  const uint16_t* const x;
  const int num_rows;
  const float* const scales;  // [kRows], scale_stride apart
  const int64_t scale_stride;
  const NextRows next;

  // One group of `count` columns whose inputs start at `input`; kVectorsUsed is 4, or 2 when
  // count <= kBlock.
  template <bool kSingle, int kVectorsUsed>
  [[gnu::always_inline]] void group(const Groups& g, int64_t count, const uint16_t* input,
                                    __m512 (*total)[kRows]) {
    const uint8_t* p = w.data + row * w.row_stride_bytes + g.begin * kElement;
    __m512i weight[kRows][kVectorsUsed];
    __m512 scale[kRows], acc[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* q = p + i * w.row_stride_bytes;
      const uint8_t* ahead = next.rows + i * next.stride_bytes + g.begin * kElement;
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
      decoder(q, count, weight[i]);
      if constexpr (kVectorsUsed > 2) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
        decoder(q + kBlock * kElement, count - kBlock, weight[i] + 2);
      }
      scale[i] = _mm512_set1_ps(
          Decoder::kFormat == Format::kFP8 ? scales[i * scale_stride + g.scale_index] : 1.0f);
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
    __m512 total[kSingle ? 1 : kMaxGemvRows][kRows];
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
    const uint16_t* input = x;
    for (Groups g(w); !g.done(); g.next(), input += num_rows * kGroup) {
      if (g.count() == kGroup)
        group<kSingle, 4>(g, kGroup, input, total);
      else if (g.count() > kBlock)
        group<kSingle, 4>(g, g.count(), input, total);
      else
        group<kSingle, 2>(g, g.count(), input, total);
    }
    for (int r = 0; r < (kSingle ? 1 : num_rows); ++r)
      for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
  }
};

// Scratch of a call: inputs [num_rows] as BF16, there already when `ready`, and the scales of
// kRowsTogether weight rows.
struct Scratch {
  uint16_t* inputs;
  bool ready;
  float* scales;
  int64_t scale_stride;
  const KeptInputs* kept;  // or null

  // The rows to fetch while `count` rows from `row` on are multiplied.
  NextRows next(const MatrixView& w, int64_t row, int64_t count, int64_t end) const {
    if (row + count >= end && kept != nullptr && kept->next_rows != nullptr)
      return {kept->next_rows, kept->next_stride_bytes};
    return {w.data + (row + count) * w.row_stride_bytes, w.row_stride_bytes};
  }
};

// The scales of weight rows [row, row + rows), if they have any, as float32.
[[gnu::always_inline]] inline void convert_row_scales(const MatrixView& w, int64_t row,
                                                      int64_t rows, const Scratch& scratch) {
  if (!has_row_scales(w.format)) return;
  for (int64_t i = 0; i < rows; ++i)
    convert_scales(w.scale_type, scale_row(w, row + i), num_scales(w), 1.0f,
                   scratch.scales + i * scratch.scale_stride);
}

// function(row, constant of 4 or 1) for the rows, whose scales are then there as float32.
template <typename Function>
[[gnu::always_inline]] inline void for_rows(const MatrixView& w, int64_t begin, int64_t end,
                                            const Scratch& scratch, const Function& function) {
  int64_t row = begin;
  for (; row + kRowsTogether <= end; row += kRowsTogether) {
    convert_row_scales(w, row, kRowsTogether, scratch);
    function(row, std::integral_constant<int, kRowsTogether>{});
  }
  for (; row < end; ++row) {
    convert_row_scales(w, row, 1, scratch);
    function(row, std::integral_constant<int, 1>{});
  }
}

template <typename Decoder>
void gemv_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                 int num_rows, float* const* y, const Scratch& scratch) {
  uint16_t* input = scratch.inputs;  // group by group, in each group row by row
  for (Groups g(w); !scratch.ready && !g.done(); g.next())
    for (int r = 0; r < num_rows; ++r, input += kGroup) prepare_group(w.format, g, x[r], input);
  const Decoder decoder;
  for_rows(w, row_begin, row_end, scratch, [&](int64_t row, auto rows) {
    RowTile<Decoder, rows.value> tile{decoder,
                                      w,
                                      row,
                                      scratch.inputs,
                                      num_rows,
                                      scratch.scales,
                                      scratch.scale_stride,
                                      scratch.next(w, row, rows.value, row_end)};
    if (num_rows == 1)
      tile.template run<true>(y);
    else
      tile.template run<false>(y);
  });
}

// x in fixed point, block by block, in each block row by row.
template <typename Decoder>
const FixedInputs* fix_rows(const MatrixView& w, const float* const* x, int num_rows,
                            const Scratch& scratch) {
  auto* const inputs = reinterpret_cast<FixedInputs*>(scratch.inputs);
  FixedInputs* input = inputs;
  for (int64_t col = 0; !scratch.ready && col < w.cols; col += kFixedColumns)
    for (int r = 0; r < num_rows; ++r, ++input)
      fix_inputs<Decoder>(x[r] + col, std::min(w.cols - col, kFixedColumns), *input);
  return inputs;
}

template <typename Nibbles>
void gemv_nibbles(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                  int num_rows, float* const* y, const Scratch& scratch) {
  const FixedInputs* inputs = fix_rows<Nibbles>(w, x, num_rows, scratch);
  const NibbleScales order = nibble_scales(w);
  for (int64_t row = row_begin; row < row_end; row += kNibbleRows) {
    const int64_t rows = std::min<int64_t>(row_end - row, kNibbleRows);
    convert_row_scales(w, row, rows, scratch);
    NibbleTile<Nibbles> tile{w,
                             row,
                             rows,
                             inputs,
                             num_rows,
                             scratch.scales,
                             scratch.scale_stride,
                             scratch.next(w, row, rows, row_end)};
    if (num_rows == 1)
      tile.template run<true>(order, y);
    else
      tile.template run<false>(order, y);
  }
}

template <typename Block>
void gemv_k_quants(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                   int num_rows, float* const* y, const Scratch& scratch) {
  const FixedInputs* inputs = fix_rows<Block>(w, x, num_rows, scratch);
  for_rows(w, row_begin, row_end, scratch, [&](int64_t row, auto rows) {
    KTile<Block, rows.value> tile{w, row, inputs, num_rows,
                                  scratch.next(w, row, rows.value, row_end)};
    if (num_rows == 1)
      tile.template run<true>(y);
    else
      tile.template run<false>(y);
  });
}

// Whether the kernels here take products of w; blocks of FP8 narrower than a group would need more
// padding than the scratch has.
bool takes(const MatrixView& w, Compute compute) {
  if (compute == Compute::kExact || w.col_step != 1) return false;
  switch (w.format) {
    case Format::kBF16:
    case Format::kQ4_0:
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K:
    case Format::kMXFP4Block: return true;
    case Format::kFP8: return w.block_cols >= kGroup;
    case Format::kInt4:
    case Format::kMXFP4: return regular_scales(w);
    default: return false;
  }
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch, KeptInputs* kept) {
  if (!takes(w, compute))
    return kMatmulAvx512.gemv(w, row_begin, row_end, compute, x, num_rows, y, scratch, kept);
  const Scratch parts = {
      static_cast<uint16_t*>(kept != nullptr ? kept->memory : scratch),
      kept != nullptr && kept->ready(w, compute, num_rows, reinterpret_cast<const void*>(&gemv)),
      static_cast<float*>(scratch) + (kMaxGemvRows + 1) * kMaxColumns,
      (num_scales(w) + kLanes - 1) / kLanes * kLanes, kept};
  const auto run = [&](auto kernel) { kernel(w, row_begin, row_end, x, num_rows, y, parts); };
  switch (w.format) {
    case Format::kBF16: return run(gemv_format<DecoderBF16>);
    case Format::kFP8: return run(gemv_format<DecoderFP8>);
    case Format::kInt4: return run(gemv_nibbles<NibblesInt4>);
    case Format::kMXFP4: return run(gemv_nibbles<NibblesMXFP4>);
    case Format::kQ4_0: return run(gemv_nibbles<NibblesQ4_0>);
    case Format::kQ4_K: return run(gemv_k_quants<BlockQ4K>);
    case Format::kQ5_K: return run(gemv_k_quants<BlockQ5K>);
    case Format::kQ6_K: return run(gemv_k_quants<BlockQ6K>);
    default: return run(gemv_nibbles<NibblesMXFP4Block>);
  }
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (num_rows <= kMaxGemvRows)
    gemv(w, row_begin, row_end, compute, x, static_cast<int>(num_rows), y, scratch, nullptr);
  else if (compute == Compute::kExact ||
           !gemm_dot(w, row_begin, row_end, x, num_rows, y, scratch))
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
