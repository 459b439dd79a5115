// A strip of 32 outputs times all panels of x with tdpbf16ps. Only for files of that suffix.
//
// Two tiles of outputs by two panels are four tiles of sums, enough to hide the latency of one
// tdpbf16ps. The sums of a segment are stored just before the next segment starts on the same tile
// register, and scaled behind its products, up to four segments in one pass: a tdpbf16ps is then
// always under way, while scaling waits for nothing. The pipeline goes on from panel to panel.
#pragma once
#include <immintrin.h>

#include "kernels/matmul/chunks.h"

namespace moechat {
namespace matmul_amx {

constexpr int64_t kSums = kTileRows * kTileRows;
constexpr int kSlots = 4;  // segments scaled in one pass

struct BlockScratch {
  float sums[kSlots][4 * kSums];  // of segments, before scaling
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

// kW tiles of outputs by kX panels; weights are the sum of kParts tiles.
template <int kW, int kX, int kParts>
class Pipeline {
 public:
  [[gnu::always_inline]] Pipeline(const Strip& strip, BlockScratch& scratch)
      : strip_(strip), x_stride_(strip.chunk.num_tiles * kTileSize), scratch_(scratch) {}

  // All segments of the panels [panel, panel + kX).
  [[gnu::always_inline]] void panels(int64_t panel) {
    const int num_segments = strip_.chunk.num_segments;
    for (int s = 0; s < num_segments; ++s) {
      const Segment& segment = strip_.chunk.segments[s];
      const uint16_t* w = strip_.weights + segment.tile * kParts * kTileSize;
      const uint16_t* x = strip_.inputs + panel * x_stride_ + segment.tile * kTileSize;
      float* last = scratch_.sums[last_.slot];
      multiply<true>(w, x, last);
      for (int t = 1; t < segment.tiles * kParts; ++t)
        multiply<false>(w + t * kTileSize, x + t / kParts * kTileSize, last);
      if (last_.complete) scale();
      const int slot = s % kSlots;
      last_ = {panel, s - slot, slot, slot == kSlots - 1 || s == num_segments - 1};
    }
  }

  [[gnu::always_inline]] void finish() {
    store_sums(scratch_.sums[last_.slot]);
    scale();
  }

 private:
  // The segment whose sums are in the tile registers.
  struct Last {
    int64_t panel;
    int first_segment, slot;  // of those that are scaled in one pass
    bool complete;            // it is the last one of them
  };

  // One tile of columns. With kFirst a segment starts: the sums of the last one go to `last`.
  template <bool kFirst>
  [[gnu::always_inline]] void multiply(const uint16_t* w, const uint16_t* x, float* last) const {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    if constexpr (kFirst) {
      _tile_stored(0, last, 64);
      _tile_zero(0);
    }
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kX > 1) {
      _tile_loadd(7, x + x_stride_, 64);
      if constexpr (kFirst) {
        _tile_stored(1, last + kSums, 64);
        _tile_zero(1);
      }
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kW > 1) {
      _tile_loadd(5, w + kParts * x_stride_, 64);
      if constexpr (kFirst) {
        _tile_stored(2, last + 2 * kSums, 64);
        _tile_zero(2);
      }
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kW > 1 && kX > 1) {
      if constexpr (kFirst) {
        _tile_stored(3, last + 3 * kSums, 64);
        _tile_zero(3);
      }
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  [[gnu::always_inline]] static void store_sums(float* last) {
    _tile_stored(0, last, 64);
    if constexpr (kX > 1) _tile_stored(1, last + kSums, 64);
    if constexpr (kW > 1) _tile_stored(2, last + 2 * kSums, 64);
    if constexpr (kW > 1 && kX > 1) _tile_stored(3, last + 3 * kSums, 64);
  }

  // Adds the sums of the slots up to the last one's to the totals.
  [[gnu::always_inline]] void scale() {
    switch (last_.slot) {
      case 0: return scale_slots<1>();
      case 1: return scale_slots<2>();
      case 2: return scale_slots<3>();
      default: return scale_slots<kSlots>();
    }
  }
  template <int kCount>
  [[gnu::always_inline]] void scale_slots() {
    for (int a = 0; a < kW; ++a) {
      const float* scales = strip_.scales + a * kTileRows * kScaleStride + last_.first_segment;
      float* totals = strip_.sums + (a * strip_.panels + last_.panel) * kSums;
#pragma GCC unroll 16
      for (int64_t n = 0; n < kTileRows; ++n) {
        __m512 factor[kCount];
#pragma GCC unroll 4
        for (int s = 0; s < kCount; ++s) factor[s] = _mm512_set1_ps(scales[n * kScaleStride + s]);
#pragma GCC unroll 2
        for (int b = 0; b < kX; ++b) {
          float* total = totals + b * kSums + n * kTileRows;
          __m512 sum = _mm512_load_ps(total);
#pragma GCC unroll 4
          for (int s = 0; s < kCount; ++s)
            sum = _mm512_fmadd_ps(
                _mm512_load_ps(scratch_.sums[s] + (a * 2 + b) * kSums + n * kTileRows), factor[s],
                sum);
          _mm512_store_ps(total, sum);
        }
      }
    }
  }

  const Strip& strip_;
  const int64_t x_stride_;
  BlockScratch& scratch_;
  Last last_ = {0, 0, 0, false};
};

template <int kW, int kX, int kParts>
void multiply_panels(const Strip& strip, int64_t panel, int64_t end, Ahead& ahead,
                     BlockScratch& scratch) {
  if (panel == end) return;
  Pipeline<kW, kX, kParts> pipeline(strip, scratch);
  for (; panel < end; panel += kX) {
    ahead.step();
    pipeline.panels(panel);
  }
  pipeline.finish();
}

// sums[a][panel] += the strip's weights times the panel, for a < output_tiles (1 or 2).
template <int kParts>
[[gnu::always_inline]] inline void multiply_strip(const Strip& strip, int output_tiles,
                                                  Ahead& ahead, BlockScratch& scratch) {
  __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
  const int64_t even = strip.panels / 2 * 2;
  if (output_tiles == 2) {
    multiply_panels<2, 2, kParts>(strip, 0, even, ahead, scratch);
    multiply_panels<2, 1, kParts>(strip, even, strip.panels, ahead, scratch);
  } else {
    multiply_panels<1, 2, kParts>(strip, 0, even, ahead, scratch);
    multiply_panels<1, 1, kParts>(strip, even, strip.panels, ahead, scratch);
  }
}

}  // namespace matmul_amx
}  // namespace moechat
