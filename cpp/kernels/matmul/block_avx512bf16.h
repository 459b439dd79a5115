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

constexpr int64_t kPanelsTogether = 1;

// Weights are the sum of kParts tiles.
template <int kParts>
class Multiplier {
 public:
  [[gnu::always_inline]] explicit Multiplier(BlockScratch&) {}

  // sums += weights times inputs, for all panels.
  void multiply(const Strip& strip, Ahead& ahead) {
    const int64_t blocks = (strip.panels + kBlockPanels - 1) / kBlockPanels;  // nearly equal
    const int64_t lines = (ahead.lines() + blocks - 1) / blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t panel = strip.panels * block / blocks;
      ahead.fetch(lines);
      switch (strip.panels * (block + 1) / blocks - panel) {
        case 1: multiply_panels<1>(strip, panel); break;
        case 2: multiply_panels<2>(strip, panel); break;
        default: multiply_panels<kBlockPanels>(strip, panel);
      }
    }
  }
  void finish() {}

 private:
  template <int kX>
  static void multiply_panels(const Strip& strip, int64_t panel) {
    const int64_t stride = strip.chunk.num_tiles * kTileSize;
    for (int64_t n = 0; n < 2 * kTileRows; n += kBlockOutputs) {
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
};

}  // namespace matmul_avx512bf16
}  // namespace moechat
