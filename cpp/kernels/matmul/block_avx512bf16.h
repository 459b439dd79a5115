// A strip of 32 outputs times all panels of x with vdpbf16ps. Only for files of that suffix.
//
// A lane is a row of x: eight outputs by up to three panels of 16 rows are 24 registers of sums. A
// pair of columns of each panel is loaded, that of each output broadcast.
#pragma once
#include <immintrin.h>

#include "kernels/matmul/chunks.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int kBlockOutputs = 8;
constexpr int kBlockPanels = 3;
constexpr int64_t kPanelSums = kTileRows * kTileRows;

struct BlockScratch {};

// kX panels from `panel` on by kBlockOutputs outputs, one segment. `w` is the first tile of the
// outputs' rows, x that of the panel.
template <int kX, int kParts>
[[gnu::always_inline]] inline void multiply_segment(const uint16_t* w, const uint16_t* x,
                                                    int64_t x_stride, int tiles,
                                                    const float* scales, float* sums) {
  __m512 acc[kBlockOutputs][kX];
#pragma GCC unroll 8
  for (int n = 0; n < kBlockOutputs; ++n)
#pragma GCC unroll 3
    for (int b = 0; b < kX; ++b) acc[n][b] = _mm512_setzero_ps();
  for (int t = 0; t < tiles * kParts; ++t) {
    const uint16_t* weights = w + t * kTileSize;
    const uint16_t* inputs = x + t / kParts * kTileSize;
    for (int pair = 0; pair < kTileCols / 2; ++pair) {
      __m512bh input[kX];
#pragma GCC unroll 3
      for (int b = 0; b < kX; ++b)
        input[b] = (__m512bh)_mm512_load_si512(inputs + b * x_stride + pair * kTileCols);
#pragma GCC unroll 8
      for (int n = 0; n < kBlockOutputs; ++n) {
        int32_t both;
        __builtin_memcpy(&both, weights + n * kTileCols + pair * 2, 4);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 3
        for (int b = 0; b < kX; ++b) acc[n][b] = _mm512_dpbf16_ps(acc[n][b], input[b], weight);
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kBlockOutputs; ++n) {
    const __m512 scale = _mm512_set1_ps(scales[n * kScaleStride]);
#pragma GCC unroll 3
    for (int b = 0; b < kX; ++b) {
      float* total = sums + b * kPanelSums + n * kTileRows;
      _mm512_store_ps(total, _mm512_fmadd_ps(acc[n][b], scale, _mm512_load_ps(total)));
    }
  }
}

template <int kX, int kParts>
void multiply_panels(const Strip& strip, int64_t panel, int output_tiles) {
  const int64_t stride = strip.chunk.num_tiles * kTileSize;
  for (int n = 0; n < output_tiles * kTileRows; n += kBlockOutputs) {
    const int64_t tile = n / kTileRows, row = n % kTileRows;
    float* sums = strip.sums + (tile * strip.panels + panel) * kPanelSums + row * kTileRows;
    for (int s = 0; s < strip.chunk.num_segments; ++s) {
      const Segment& segment = strip.chunk.segments[s];
      multiply_segment<kX, kParts>(
          strip.weights + (tile * stride + segment.tile * kTileSize) * kParts + row * kTileCols,
          strip.inputs + panel * stride + segment.tile * kTileSize, stride, segment.tiles,
          strip.scales + n * kScaleStride + s, sums);
    }
  }
}

// sums[a][panel] += the strip's weights times the panel, for a < output_tiles (1 or 2).
template <int kParts>
[[gnu::always_inline]] inline void multiply_strip(const Strip& strip, int output_tiles,
                                                  Ahead& ahead, BlockScratch&) {
  const int64_t blocks = (strip.panels + kBlockPanels - 1) / kBlockPanels;  // of nearly equal size
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t panel = strip.panels * block / blocks;
    ahead.step();
    switch (strip.panels * (block + 1) / blocks - panel) {
      case 1: multiply_panels<1, kParts>(strip, panel, output_tiles); break;
      case 2: multiply_panels<2, kParts>(strip, panel, output_tiles); break;
      default: multiply_panels<kBlockPanels, kParts>(strip, panel, output_tiles);
    }
  }
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
