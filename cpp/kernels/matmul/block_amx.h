// A strip of 32 outputs times all panels of x with tdpbf16ps. Only for files of that suffix.
//
// Two tiles of outputs by two panels are four tiles of sums, enough to hide the latency of one
// tdpbf16ps. The sums of a segment are stored just before the next segment starts on the same tile
// register, and scaled behind its products, up to four segments in one pass: a tdpbf16ps is then
// always under way, while scaling waits for nothing. The pipeline goes on from panel to panel and
// from strip to strip.
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

constexpr int64_t kPanelsTogether = 2;

// Weights are the sum of kParts tiles.
template <int kParts>
class Multiplier {
 public:
  [[gnu::always_inline]] explicit Multiplier(BlockScratch& scratch) : scratch_(scratch) {}

  // sums += weights times inputs, for all panels, two at a time. What is under way when this
  // returns still needs the scales and the sums, until the next call or finish has returned.
  void multiply(const Strip& strip, Ahead& ahead) {
    __asm__ volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    x_stride_ = strip.chunk.num_tiles * kTileSize;
    const int num_segments = strip.chunk.num_segments;
    const int64_t steps = strip.panels / kPanelsTogether * strip.chunk.num_tiles * kParts;
    const int64_t lines = (ahead.lines() + steps - 1) / steps;  // evenly: fill buffers are few
    for (int64_t panel = 0; panel < strip.panels; panel += kPanelsTogether) {
      for (int s = 0; s < num_segments; ++s) {
        const Segment& segment = strip.chunk.segments[s];
        const uint16_t* w = strip.weights + segment.tile * kParts * kTileSize;
        const uint16_t* x = strip.inputs + panel * x_stride_ + segment.tile * kTileSize;
        float* last = scratch_.sums[last_.slot];
        multiply_tile<true>(w, x, last);
        ahead.fetch(lines);
        for (int t = 1; t < segment.tiles * kParts; ++t) {
          multiply_tile<false>(w + t * kTileSize, x + t / kParts * kTileSize, last);
          ahead.fetch(lines);
        }
        if (last_.complete) scale();
        const int slot = s % kSlots;
        last_ = {strip.sums + panel * kSums, strip.panels * kSums, strip.scales + s - slot, slot,
                 slot == kSlots - 1 || s == num_segments - 1};
      }
    }
  }

  [[gnu::always_inline]] void finish() {
    float* last = scratch_.sums[last_.slot];
    _tile_stored(0, last, 64);
    _tile_stored(1, last + kSums, 64);
    _tile_stored(2, last + 2 * kSums, 64);
    _tile_stored(3, last + 3 * kSums, 64);
    scale();
  }

 private:
  // The segment whose sums are in the tile registers.
  struct Last {
    float* totals;            // of output tile 0 and the first of the panels
    int64_t stride;           // to those of output tile 1
    const float* scales;      // of the first segment that is scaled in one pass with it
    int slot;                 // among those
    bool complete;            // it is the last one of them
  };

  // One tile of columns. With kFirst a segment starts: the sums of the last one go to `last`.
  template <bool kFirst>
  [[gnu::always_inline]] void multiply_tile(const uint16_t* w, const uint16_t* x,
                                            float* last) const {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    if constexpr (kFirst) {
      _tile_stored(0, last, 64);
      _tile_zero(0);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, x + x_stride_, 64);
    if constexpr (kFirst) {
      _tile_stored(1, last + kSums, 64);
      _tile_zero(1);
    }
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, w + kParts * x_stride_, 64);
    if constexpr (kFirst) {
      _tile_stored(2, last + 2 * kSums, 64);
      _tile_zero(2);
    }
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kFirst) {
      _tile_stored(3, last + 3 * kSums, 64);
      _tile_zero(3);
    }
    _tile_dpbf16ps(3, 5, 7);
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
    for (int a = 0; a < 2; ++a) {
      const float* scales = last_.scales + a * kTileRows * kScaleStride;
      float* totals = last_.totals + a * last_.stride;
#pragma GCC unroll 16
      for (int64_t n = 0; n < kTileRows; ++n) {
        __m512 factor[kCount];
#pragma GCC unroll 4
        for (int s = 0; s < kCount; ++s) factor[s] = _mm512_set1_ps(scales[n * kScaleStride + s]);
#pragma GCC unroll 2
        for (int b = 0; b < kPanelsTogether; ++b) {
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

  BlockScratch& scratch_;
  int64_t x_stride_ = 0;
  Last last_ = {nullptr, 0, nullptr, 0, false};
};

}  // namespace matmul_amx
}  // namespace moechat
