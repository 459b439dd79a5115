// How a weight row is cut for the BF16 gemm: chunks that are packed at a time, segments of columns
// that share a scale, tiles of 32 columns. Activations and weights are cut alike.
//
// A tile is 16 rows of 32 BF16 (1 KiB): 16 outputs of the weight, row by row, or 16 rows of
// activations as pairs of columns, pair by pair. That is what tdpbf16ps multiplies, and vdpbf16ps
// with one side broadcast. A segment is padded with zeros to whole units of the decoder.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"
#include "kernels/matmul/groups.h"

namespace moechat {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileCols = 32;
constexpr int64_t kTileSize = kTileRows * kTileCols;
constexpr int kMaxChunkTiles = 9;     // 256 columns and their sums: the first cache holds a strip
constexpr int64_t kScaleStride = 16;  // between the scales of two outputs: one a segment

struct Segment {
  int64_t col = 0, count = 0;  // columns of the view
  int tile = 0, tiles = 0;     // tiles of the chunk
  bool sums = false;           // not the columns, but the sums of 32 columns each (kQ4_K, kQ5_K)
};

struct Chunk {
  int num_segments = 0, num_tiles = 0;
  bool whole = false;       // nothing but tiles of columns that are all there, one after another
  int64_t first_scale = 0;  // of the first segment, counted from the row's first; +1 a segment
  Segment segments[kMaxChunkTiles];

  [[gnu::always_inline]] void push(int64_t col, int64_t count, int tiles, bool sums) {
    segments[num_segments++] = {col, count, num_tiles, tiles, sums};
    num_tiles += tiles;
    whole = whole && !sums && count == tiles * kTileCols;
  }
};

// What a decoder asks of the cut.
struct Cut {
  int max_tiles;         // of a chunk
  int unit_tiles;        // decoded together: a segment has a multiple of them
  int64_t scale_cols;    // columns that share a scale; 0: all
  bool sums;             // after every 256 columns a tile of sums
};

class Chunks {
 public:
  [[gnu::always_inline]] Chunks(const MatrixView& w, const Cut& cut)
      : cut_(cut), cols_(w.cols), edge_(w.cols) {
    if (cut.scale_cols > 0) edge_ = cut.scale_cols - w.col_origin % cut.scale_cols;
  }

  // False at the end of the row.
  [[gnu::always_inline]] bool next(Chunk& chunk) {
    chunk.num_segments = chunk.num_tiles = 0;
    chunk.whole = true;
    chunk.first_scale = scale_index_;
    const int needed = cut_.sums ? 9 : cut_.unit_tiles;
    while (col_ < cols_) {
      const int left = cut_.max_tiles - chunk.num_tiles;
      if (left < (col_ % 256 == 0 ? needed : cut_.unit_tiles)) break;
      const int64_t unit = cut_.unit_tiles * kTileCols;
      const int64_t room = left / cut_.unit_tiles * unit;
      int64_t count = (edge_ < cols_ ? edge_ : cols_) - col_;
      count = count < room ? count : room;
      chunk.push(col_, count, static_cast<int>((count + unit - 1) / unit) * cut_.unit_tiles, false);
      col_ += count;
      if (col_ == edge_) {
        edge_ += cut_.scale_cols;
        ++scale_index_;
      }
      if (cut_.sums && col_ % 256 == 0) chunk.push(col_ - 256, 256, 1, true);
    }
    return chunk.num_tiles > 0;
  }

 private:
  const Cut cut_;
  const int64_t cols_;
  int64_t edge_;
  int64_t col_ = 0, scale_index_ = 0;
};

// Weight bytes that are needed later, brought into the second-level cache line by line.
struct Ahead {
  const uint8_t* row = nullptr;
  int64_t stride_bytes = 0, row_bytes = 0;
  int64_t rows = 0;
  int64_t byte = 0;  // of the row

  [[gnu::always_inline]] int64_t lines() const {
    return rows > 0 ? rows * ((row_bytes + 63) / 64) : 0;
  }
  [[gnu::always_inline]] void fetch(int64_t count) {
    for (; count > 0 && rows > 0; --count) {
      __builtin_prefetch(row + byte, 0, 2);
      byte += 64;
      if (byte < row_bytes) continue;
      byte = 0;
      row += stride_bytes;
      --rows;
    }
  }
};

// 32 outputs (or 16) and a chunk: output tile a is chunk.num_tiles tiles behind output tile 0 in
// `weights`; panels of x stand as far apart in `inputs`.
struct Strip {
  const Chunk& chunk;
  const uint16_t* weights;
  const uint16_t* inputs;
  const float* scales;  // of an output kScaleStride apart, one a segment
  float* sums;          // [output tile][panel][16 outputs][16 rows of x]
  int64_t panels;
};

}  // namespace moechat
