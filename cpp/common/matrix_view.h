// A weight is a view (design 3.4): checkpoint bytes in place, never converted or repacked.
#pragma once
#include <cstdint>

namespace moechat {

enum class Format : uint8_t {
  kF32,       // IEEE single
  kBF16,      // bfloat16
  kFP8Block,  // FP8 e4m3 with a float32 scale per block_rows x block_cols block, multiplied
};

// Bytes of one element. Every format so far has whole-byte elements.
[[gnu::always_inline]] inline int64_t element_bytes(Format format) {
  return format == Format::kF32 ? 4 : format == Format::kBF16 ? 2 : 1;
}

// Row-major [rows, cols] weight: y = W x contracts over cols. Base and scales may be unaligned.
// `row_origin` and `col_origin` place the view in its parent's scale grid, so that a slice whose
// edge lies inside a block (the heads of kv_b_proj) still finds its scales.
struct MatrixView {
  Format format = Format::kF32;
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride_bytes = 0;
  const uint8_t* scale = nullptr;  // float32 grid, row-major; null unless kFP8Block
  int64_t scale_row_stride = 0;    // floats between rows of the grid
  int32_t block_rows = 128;
  int32_t block_cols = 128;
  int64_t row_origin = 0;
  int64_t col_origin = 0;

  // Rows [begin, begin + count) as a view of their own.
  [[gnu::always_inline]] MatrixView row_slice(int64_t begin, int64_t count) const {
    MatrixView slice = *this;
    slice.data += begin * row_stride_bytes;
    slice.rows = count;
    slice.row_origin += begin;
    return slice;
  }

  // Columns [begin, begin + count) as a view of their own.
  [[gnu::always_inline]] MatrixView col_slice(int64_t begin, int64_t count) const {
    MatrixView slice = *this;
    slice.data += begin * element_bytes(format);
    slice.cols = count;
    slice.col_origin += begin;
    return slice;
  }

  // Address of the float32 scale of element (row, col) of this view.
  [[gnu::always_inline]] const uint8_t* scale_at(int64_t row, int64_t col) const {
    return scale + 4 * ((row + row_origin) / block_rows * scale_row_stride +
                        (col + col_origin) / block_cols);
  }
};

}  // namespace moechat
