// The walk along a weight row in groups: columns that share one scale, at most kGroup of them. No
// division on the way, for a division costs as much as the group's arithmetic.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"
#include "common/number_formats.h"

namespace moechat {

constexpr int64_t kGroup = 128;  // columns between two uses of a scale

// Whether the columns of a row share scales of a grid.
[[gnu::always_inline]] inline bool has_row_scales(Format format) {
  return format == Format::kFP8 || format == Format::kMXFP4 || format == Format::kInt4;
}

// Columns that share a scale; 0 for formats whose decoders yield values.
[[gnu::always_inline]] inline int64_t scale_columns(const MatrixView& w) {
  if (has_row_scales(w.format)) return w.block_cols;
  return unit_of(w.format).cols == 32 ? 32 : 0;
}

struct Groups {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t scale_index = 0;  // of this group, counted from the first group's

  [[gnu::always_inline]] explicit Groups(const MatrixView& w)
      : cols_(w.cols), edge_(w.cols), block_cols_(scale_columns(w)) {
    if (block_cols_ > 0) edge_ = block_cols_ - w.col_origin % block_cols_;
    set_end();
  }
  [[gnu::always_inline]] bool done() const { return begin >= cols_; }
  [[gnu::always_inline]] int64_t count() const { return end - begin; }
  [[gnu::always_inline]] void next() {
    begin = end;
    if (begin == edge_) {
      edge_ += block_cols_;
      ++scale_index;
    }
    set_end();
  }

 private:
  [[gnu::always_inline]] void set_end() {
    end = begin + kGroup;
    end = edge_ < end ? edge_ : end;
    end = cols_ < end ? cols_ : end;
  }

  int64_t cols_, edge_, block_cols_;
};

// Scales of a row of the view, in the grid.
[[gnu::always_inline]] inline int64_t num_scales(const MatrixView& w) {
  return (w.col_origin + w.cols - 1) / w.block_cols - w.col_origin / w.block_cols + 1;
}

// The scale of stored row `row` at its first column; those of the next groups follow.
[[gnu::always_inline]] inline const uint8_t* scale_row(const MatrixView& w, int64_t row) {
  return w.scale + w.grid_row(row) * w.scale_row_stride_bytes +
         w.col_origin / w.block_cols * scale_bytes(w.scale_type);
}

// Scale number `index` from p.
[[gnu::always_inline]] inline float load_scale(ScaleType type, const uint8_t* p, int64_t index) {
  switch (type) {
    case ScaleType::kF32: return load_f32(p + 4 * index);
    case ScaleType::kBF16: return bf16_to_f32(load_u16(p + 2 * index));
    case ScaleType::kF16: return f16_to_f32(load_u16(p + 2 * index));
    case ScaleType::kE8M0: return e8m0_to_f32(p[index]);
  }
  return 0;
}

}  // namespace moechat
