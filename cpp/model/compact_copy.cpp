#include "model/compact_copy.h"

#include <algorithm>
#include <cstring>

namespace moechat {
namespace {

constexpr int64_t kAlignment = 64;

// A run of `rows` x `row_bytes`, `stride_bytes` apart.
struct Block {
  const uint8_t* data = nullptr;
  int64_t rows = 0, row_bytes = 0, stride_bytes = 0;

  int64_t room() const {
    return (rows * row_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  void copy(uint8_t* to) const {
    if (stride_bytes == row_bytes) {
      std::memcpy(to, data, static_cast<size_t>(rows * row_bytes));
      return;
    }
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * row_bytes, data + r * stride_bytes, static_cast<size_t>(row_bytes));
  }
};

Block stored(const MatrixView& view) {
  const Unit unit = unit_of(view.format);
  return {view.data, view.format == Format::kGPTQ ? view.rows / 8 : view.rows,
          (view.cols + unit.cols - 1) / unit.cols * unit.bytes, view.row_stride_bytes};
}

// What a view uses of its grid: rows from `first_row` on, columns from `first_col` on.
struct Grid {
  int64_t first_row = 0, rows = 0, first_col = 0;
  Block scale, zeros;
};

Grid grid_of(const MatrixView& view) {
  Grid grid;
  if (view.scale == nullptr) return grid;
  if (view.group_index == nullptr) {
    grid.first_row = view.grid_row(0);
    grid.rows = view.grid_row(view.rows - 1) + 1 - grid.first_row;
  } else {  // the index names rows of the whole grid
    for (int64_t r = 0; r < view.rows; ++r) grid.rows = std::max(grid.rows, view.grid_row(r) + 1);
  }
  const int64_t end_col = (view.col_origin + view.cols - 1) / view.block_cols + 1;
  grid.first_col = view.col_origin / view.block_cols;
  const int64_t bytes = scale_bytes(view.scale_type);
  grid.scale = {view.scale + grid.first_row * view.scale_row_stride_bytes + grid.first_col * bytes,
                grid.rows, (end_col - grid.first_col) * bytes, view.scale_row_stride_bytes};
  if (view.zeros != nullptr)  // 8 columns an int32; the view begins at a multiple of 8
    grid.zeros = {
        view.zeros + grid.first_row * view.zeros_row_stride_bytes + grid.first_col / 8 * 4,
        grid.rows, ((end_col + 7) / 8 - grid.first_col / 8) * 4, view.zeros_row_stride_bytes};
  return grid;
}

Block group_index(const MatrixView& view) {
  if (view.group_index == nullptr) return {};
  return {view.group_index, 1, 4 * view.rows, 4 * view.rows};
}

// Columns that stand `col_step` elements apart, side by side.
void copy_stepped(const MatrixView& view, int64_t row_bytes, uint8_t* to) {
  const auto bytes = static_cast<size_t>(unit_of(view.format).bytes);
  for (int64_t r = 0; r < view.rows; ++r)
    for (int64_t c = 0; c < view.cols; ++c)
      std::memcpy(to + r * row_bytes + c * static_cast<int64_t>(bytes),
                  view.data + r * view.row_stride_bytes +
                      c * view.col_step * static_cast<int64_t>(bytes),
                  bytes);
}

}  // namespace

size_t compact_bytes(const MatrixView& view) {
  const Grid grid = grid_of(view);
  return static_cast<size_t>(stored(view).room() + grid.scale.room() + grid.zeros.room() +
                             group_index(view).room());
}

MatrixView compact_copy(const MatrixView& view, uint8_t* to) {
  MatrixView copy = view;
  const Block data = stored(view), index = group_index(view);
  const Grid grid = grid_of(view);
  if (view.col_step == 1)
    data.copy(to);
  else
    copy_stepped(view, data.row_bytes, to);
  copy.data = to;
  copy.col_step = 1;
  copy.row_stride_bytes = data.row_bytes;
  to += data.room();
  copy.row_origin = copy.col_origin = 0;
  if (view.scale == nullptr) return copy;
  copy.row_origin = view.row_origin - grid.first_row * view.block_rows;
  copy.col_origin = view.col_origin - grid.first_col * view.block_cols;
  grid.scale.copy(to);
  copy.scale = to;
  copy.scale_row_stride_bytes = grid.scale.row_bytes;
  to += grid.scale.room();
  if (view.zeros != nullptr) {
    grid.zeros.copy(to);
    copy.zeros = to;
    copy.zeros_row_stride_bytes = grid.zeros.row_bytes;
    to += grid.zeros.room();
  }
  if (view.group_index != nullptr) {
    index.copy(to);
    copy.group_index = to;
    copy.row_origin = view.row_origin;
  }
  return copy;
}

}  // namespace moechat
