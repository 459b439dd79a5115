// gemm by groups of columns: weight rows are decoded to BF16 and packed in pairs of columns, rows
// side by side; all rows of x meet them; the scale multiplies the float32 sum of each group.
#include "kernels/matmul/gemm_dot.h"

#include <cpuid.h>
#include <immintrin.h>

#include "kernels/matmul/decoders_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx512.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int kLanes = 16;
constexpr int kDotRows = 12;     // register block: rows of x times vectors of weight rows
constexpr int kDotVectors = 2;
constexpr int64_t kPanel = kDotVectors * kLanes;            // weight rows side by side
constexpr int64_t kPanels = 8;                              // panels packed at a time
constexpr int64_t kPairs = kGroup / 2;
constexpr int64_t kChunk = 120;                             // rows of x copied at a time

struct Panel {
  __m512i weights[kPairs][kDotVectors];  // [pair of columns][weight row][2] BF16
  __m512 scale[kDotVectors];
};

// Weight rows from `row` on, zeros beyond row_end.
template <typename Decoder>
void pack_panel(const Decoder& decoder, const MatrixView& w, int64_t row, int64_t row_end,
                const Groups& g, Panel& panel) {
  constexpr int64_t kElement = Decoder::kFormat == Format::kFP8Block ? 1 : 2;
  const bool wide = g.count() > kBlock;
  for (int v = 0; v < kDotVectors; ++v) {
    __m512i rows[kLanes][kGroup / 32];
    alignas(64) float scale[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
      const int64_t n = row + v * kLanes + i;
      if (n >= row_end) {
        for (__m512i& part : rows[i]) part = _mm512_setzero_si512();
        continue;
      }
      const uint8_t* p = w.data + n * w.row_stride_bytes + g.begin * kElement;
      decoder(p, g.count(), rows[i]);
      if (wide) decoder(p + kBlock * kElement, g.count() - kBlock, rows[i] + 2);
      scale[i] = Decoder::kFormat == Format::kFP8Block
                     ? load_f32(scale_row(w, n) + 4 * g.scale_col) : 1.0f;
    }
    for (int part = 0; part < (wide ? 4 : 2); ++part) {
      __m512 tile[kLanes];  // a pair of BF16 moves like a float
      for (int i = 0; i < kLanes; ++i) tile[i] = _mm512_castsi512_ps(rows[i][part]);
      matmul_avx512::transpose(tile);
      for (int i = 0; i < kLanes; ++i)
        panel.weights[part * kLanes + i][v] = _mm512_castps_si512(tile[i]);
    }
    panel.scale[v] = _mm512_load_ps(scale);
  }
}

// kRows rows of x against one panel; `columns` of its weight rows are wanted.
template <int kRows>
void dot_block(const Panel& panel, int64_t pairs, const uint16_t* x, float* const* y,
               int64_t column, int64_t columns, bool first_group) {
  __m512 acc[kRows][kDotVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVectors; ++v) acc[r][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512 pair = _mm512_set1_ps(load_f32(x + r * kGroup + 2 * k));  // moves bits only
#pragma GCC unroll 4
      for (int v = 0; v < kDotVectors; ++v)
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)pair, (__m512bh)panel.weights[k][v]);
    }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVectors; ++v) {
      const int64_t left = columns - v * kLanes;
      if (left <= 0) continue;
      float* out = y[r] + column + v * kLanes;
      const auto mask = static_cast<__mmask16>(left >= kLanes ? 0xffffu : (1u << left) - 1u);
      const __m512 before = first_group ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, out);
      _mm512_mask_storeu_ps(out, mask, _mm512_fmadd_ps(acc[r][v], panel.scale[v], before));
    }
}

// dot_block for `rows` in 1..kRows.
template <int kRows>
[[gnu::always_inline]] inline void dot_rows(int64_t rows, const Panel& panel, int64_t pairs,
                                            const uint16_t* x, float* const* y, int64_t column,
                                            int64_t columns, bool first_group) {
  if (rows == kRows)
    dot_block<kRows>(panel, pairs, x, y, column, columns, first_group);
  else if constexpr (kRows > 1)
    dot_rows<kRows - 1>(rows, panel, pairs, x, y, column, columns, first_group);
}

template <typename Decoder>
void gemm_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                 int64_t num_rows, float* const* y, void* scratch) {
  auto* panels = static_cast<Panel*>(scratch);
  auto* inputs = reinterpret_cast<uint16_t*>(panels + kPanels);  // [kChunk][kGroup]
  const Decoder decoder;
  for (int64_t begin = row_begin; begin < row_end; begin += kPanels * kPanel) {
    const int64_t end = begin + kPanels * kPanel < row_end ? begin + kPanels * kPanel : row_end;
    for (Groups g(w); !g.done(); g.next()) {
      const int64_t pairs = g.count() > kBlock ? kPairs : kPairs / 2;
      for (int64_t column = begin; column < end; column += kPanel)
        pack_panel(decoder, w, column, row_end, g, panels[(column - begin) / kPanel]);
      for (int64_t chunk = 0; chunk < num_rows; chunk += kChunk) {
        const int64_t rows = num_rows - chunk < kChunk ? num_rows - chunk : kChunk;
        for (int64_t r = 0; r < rows; ++r)
          prepare_group(w.format, g, x[chunk + r], inputs + r * kGroup);
        const int64_t blocks = (rows + kDotRows - 1) / kDotRows;  // of nearly equal size
        for (int64_t column = begin; column < end; column += kPanel)
          for (int64_t block = 0; block < blocks; ++block) {
            const int64_t r = rows * block / blocks, r_end = rows * (block + 1) / blocks;
            dot_rows<kDotRows>(r_end - r, panels[(column - begin) / kPanel], pairs,
                               inputs + r * kGroup, y + chunk + r, column, row_end - column,
                               g.begin == 0);
          }
      }
    }
  }
}

void gemm_dot(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int64_t num_rows, float* const* y, void* scratch) {
  if (w.format == Format::kFP8Block)
    gemm_format<DecoderFP8>(w, row_begin, row_end, x, num_rows, y, scratch);
  else
    gemm_format<DecoderBF16>(w, row_begin, row_end, x, num_rows, y, scratch);
}

bool dot_products_are_fast() {
  static const bool fast = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    return family >= 0x1a;  // Zen 5
  }();
  return fast;
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
