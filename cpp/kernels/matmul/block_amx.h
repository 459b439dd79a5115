// A strip of 32 outputs times all panels of x with tdpbf16ps. Only for files of that suffix.
//
// Two tiles of outputs by two panels are four tiles of sums, enough to hide the latency of one
// tdpbf16ps. The sums of a segment are stored just before the next segment starts on the same tile
// register, and scaled a segment later: a tdpbf16ps is then always under way, while scaling waits
// for nothing. Such a pipeline goes on from panel to panel.
#pragma once
#include <immintrin.h>

#include "kernels/matmul/chunks.h"

namespace moechat {
namespace matmul_amx {

constexpr int64_t kSums = kTileRows * kTileRows;

struct BlockScratch {
  float sums[2][4 * kSums];  // of the last segments, before scaling
  float unused[4 * kSums];   // what the pipeline's first two steps scale
  float no_scales[2 * kTileRows * 32];
};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfig kTileConfig;

// Tile registers 0-3: sums; 4-5: weights; 6-7: activations. Configured as long as this lives, so
// that nothing is left for a context switch to save.
class TileRegisters {
 public:
  TileRegisters() { _tile_loadconfig(&kTileConfig); }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// kW tiles of outputs by kX panels.
template <int kW, int kX>
class Pipeline {
 public:
  // The sums of output tile a and panel b start at sums + a * sum_stride + b * kSums, the scale of
  // output n of tile a stands at scales[(a * 16 + n) * kScales].
  struct Target {
    float* sums;
    int64_t sum_stride;
    const float* scales;
  };
  static constexpr int64_t kScales = 32;

  [[gnu::always_inline]] explicit Pipeline(BlockScratch& scratch) : scratch_(scratch) {
    for (float& sum : scratch.sums[0]) sum = 0;
    for (float& sum : scratch.sums[1]) sum = 0;
    for (float& scale : scratch.no_scales) scale = 0;
    for (float& sum : scratch.unused) sum = 0;
    for (Target& target : targets_) target = {scratch.unused, 2 * kSums, scratch.no_scales};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // One segment: `tiles` tiles of weights from w on, the second output tile w_stride elements
  // behind; likewise the panels.
  [[gnu::always_inline]] void segment(const uint16_t* w, int64_t w_stride, const uint16_t* x,
                                      int64_t x_stride, int tiles, const Target& target) {
    float* last = scratch_.sums[parity_];
    load(w, w_stride, x, x_stride);
    start(last);
    for (int t = 1; t < tiles; ++t) {
      w += kTileSize;
      x += kTileSize;
      load(w, w_stride, x, x_stride);
      add();
    }
    scale(scratch_.sums[parity_ ^ 1], targets_[0]);
    targets_[0] = targets_[1];
    targets_[1] = target;
    parity_ ^= 1;
  }

  [[gnu::always_inline]] void finish() {
    float* last = scratch_.sums[parity_];
    start(last);
    scale(scratch_.sums[parity_ ^ 1], targets_[0]);
    scale(last, targets_[1]);
  }

 private:
  [[gnu::always_inline]] static void load(const uint16_t* w, int64_t w_stride, const uint16_t* x,
                                          int64_t x_stride) {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    if constexpr (kX > 1) _tile_loadd(7, x + x_stride, 64);
    if constexpr (kW > 1) _tile_loadd(5, w + w_stride, 64);
  }
  [[gnu::always_inline]] static void add() {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kX > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kW > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kW > 1 && kX > 1) _tile_dpbf16ps(3, 5, 7);
  }
  // Stores the last segment's sums, register by register, and starts the next.
  [[gnu::always_inline]] static void start(float* last) {
    _tile_stored(0, last, 64);
    _tile_zero(0);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kX > 1) {
      _tile_stored(1, last + kSums, 64);
      _tile_zero(1);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kW > 1) {
      _tile_stored(2, last + 2 * kSums, 64);
      _tile_zero(2);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kW > 1 && kX > 1) {
      _tile_stored(3, last + 3 * kSums, 64);
      _tile_zero(3);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  [[gnu::always_inline]] static void scale(const float* sums, const Target& target) {
    for (int a = 0; a < kW; ++a)
#pragma GCC unroll 16
      for (int n = 0; n < kTileRows; ++n) {
        const __m512 factor = _mm512_set1_ps(target.scales[(a * kTileRows + n) * kScales]);
#pragma GCC unroll 2
        for (int b = 0; b < kX; ++b) {
          float* total = target.sums + a * target.sum_stride + b * kSums + n * kTileRows;
          const __m512 fresh = _mm512_load_ps(sums + (a * 2 + b) * kSums + n * kTileRows);
          _mm512_store_ps(total, _mm512_fmadd_ps(fresh, factor, _mm512_load_ps(total)));
        }
      }
  }

  BlockScratch& scratch_;
  Target targets_[2];  // of the segment before the last, and of the last
  int parity_ = 0;
};

template <int kW, int kX>
void multiply_panels(const Chunk& chunk, int64_t panel, int64_t end, int64_t panels,
                     const uint16_t* weights, const uint16_t* inputs, const float* scales,
                     float* sums, BlockScratch& scratch) {
  const int64_t stride = chunk.num_tiles * kTileSize;
  Pipeline<kW, kX> pipeline(scratch);
  for (; panel + kX <= end; panel += kX)
    for (int s = 0; s < chunk.num_segments; ++s) {
      const Segment& segment = chunk.segments[s];
      const int64_t tile = segment.tile * kTileSize;
      pipeline.segment(weights + tile, stride, inputs + panel * stride + tile, stride,
                       segment.tiles, {sums + panel * kSums, panels * kSums, scales + s});
    }
  pipeline.finish();
}

// sums[a][panel] += the strip's weights times the panel, for a < output_tiles (1 or 2).
[[gnu::always_inline]] inline void multiply_strip(const Chunk& chunk, int output_tiles,
                                                  int64_t panels, const uint16_t* weights,
                                                  const uint16_t* inputs, const float* scales,
                                                  float* sums, BlockScratch& scratch) {
  const int64_t even = panels / 2 * 2;
  __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
  const auto run = [&](auto multiply, int64_t begin, int64_t end) {
    if (begin < end)
      multiply(chunk, begin, end, panels, weights, inputs, scales, sums, scratch);
  };
  if (output_tiles == 2) {
    run(multiply_panels<2, 2>, 0, even);
    run(multiply_panels<2, 1>, even, panels);
  } else {
    run(multiply_panels<1, 2>, 0, even);
    run(multiply_panels<1, 1>, even, panels);
  }
}

}  // namespace matmul_amx
}  // namespace moechat
