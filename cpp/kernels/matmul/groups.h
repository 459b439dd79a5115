// The walk along a weight row in groups: columns that share one scale, at most kGroup of them. No
// division on the way, for a division costs as much as the group's arithmetic.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {

constexpr int64_t kGroup = 128;  // columns between two uses of a scale

struct Groups {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t scale_col = 0;  // of this group, in the scale grid

  [[gnu::always_inline]] explicit Groups(const MatrixView& w) : cols_(w.cols), edge_(w.cols) {
    if (w.format == Format::kFP8) {
      block_cols_ = w.block_cols;
      scale_col = w.col_origin / block_cols_;
      edge_ = block_cols_ - w.col_origin % block_cols_;
    }
    set_end();
  }
  [[gnu::always_inline]] bool done() const { return begin >= cols_; }
  [[gnu::always_inline]] int64_t count() const { return end - begin; }
  [[gnu::always_inline]] void next() {
    begin = end;
    if (begin == edge_) {
      edge_ += block_cols_;
      ++scale_col;
    }
    set_end();
  }

 private:
  [[gnu::always_inline]] void set_end() {
    end = begin + kGroup;
    end = edge_ < end ? edge_ : end;
    end = cols_ < end ? cols_ : end;
  }

  int64_t cols_, edge_, block_cols_ = 0;
};

// The row of the scale grid that weight row `row` uses; null for formats without scales.
[[gnu::always_inline]] inline const uint8_t* scale_row(const MatrixView& w, int64_t row) {
  if (w.format != Format::kFP8) return nullptr;
  return w.scale + (row + w.row_origin) / w.block_rows * w.scale_row_stride_bytes;
}

}  // namespace moechat
