// A weight is a view (design 3.4): checkpoint bytes in place, never converted or repacked.
#pragma once
#include <cstdint>
#include <cstring>

namespace moechat {

// How a stored row's elements are encoded. "Grid": one scale a block_rows x block_cols block of the
// stored matrix, in an array of its own, multiplied.
enum class Format : uint8_t {
  kF32,
  kF16,
  kBF16,
  kFP8,    // e4m3, grid
  kMXFP4,  // e2m1 nibbles, low first, grid of 1 x 32 E8M0 (OCP MX specification 1.0)
  kInt4,   // nibbles, low first, value = code - 8; grid (compressed-tensors "pack-quantized")
  // Transposed only; grid of block_cols 1, zero points of 4 bits: value = (code - zero) * scale.
  kAWQ,    // 8 outputs an int32 in the order 0 2 4 6 1 3 5 7 from the lowest nibble, zeros alike
  kGPTQ,   // 8 inputs an int32, low first; zeros 8 outputs an int32, low first, stored less one
  // GGUF blocks: scales stand inside the block (ggml's quantisation formats).
  kQ8_0,        // 32: f16 d, 32 int8
  kQ4_0,        // 32: f16 d, 16 bytes; value = d * (code - 8), low nibbles first half
  kQ5_0,        // 32: f16 d, 4 bytes of fifth bits, 16 bytes; value = d * (code - 16)
  kQ4_K,        // 256: f16 d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes
  kQ5_K,        // 256: the same with 32 bytes of fifth bits
  kQ6_K,        // 256: 128 bytes low, 64 bytes high, 16 int8 scales, f16 d
  kMXFP4Block,  // 32: E8M0, 16 bytes; low nibbles first half
};

enum class ScaleType : uint8_t { kF32, kBF16, kF16, kE8M0 };

[[gnu::always_inline]] constexpr int64_t scale_bytes(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kE8M0 ? 1 : 2;
}

// Columns that one unit of a stored row holds, and its bytes.
struct Unit {
  int64_t cols, bytes;
};
[[gnu::always_inline]] constexpr Unit unit_of(Format format) {
  switch (format) {
    case Format::kF32: return {1, 4};
    case Format::kF16:
    case Format::kBF16: return {1, 2};
    case Format::kFP8: return {1, 1};
    case Format::kMXFP4: return {2, 1};
    case Format::kInt4:
    case Format::kAWQ: return {8, 4};
    case Format::kGPTQ: return {1, 4};  // a stored row of words holds 8 inputs
    case Format::kQ8_0: return {32, 34};
    case Format::kQ4_0: return {32, 18};
    case Format::kQ5_0: return {32, 22};
    case Format::kQ4_K: return {256, 144};
    case Format::kQ5_K: return {256, 176};
    case Format::kQ6_K: return {256, 210};
    case Format::kMXFP4Block: return {32, 17};
  }
  return {1, 1};
}

// Columns at whose multiples a view can be cut.
[[gnu::always_inline]] constexpr int64_t cut_of(Format format) {
  return format == Format::kGPTQ ? 8 : unit_of(format).cols;  // 8: for its zeros
}

// Bytes of one element; only for formats of whole-byte elements.
[[gnu::always_inline]] inline int64_t element_bytes(Format format) { return unit_of(format).bytes; }

// A stored matrix of `rows` x `cols` elements, row-major. As a weight it is [outputs, inputs], or
// [inputs, outputs] when `transposed`. Base and scales may be unaligned. `row_origin` and
// `col_origin` place the view in its parent's scale grid, so that a slice whose edge lies inside a
// block (the heads of kv_b_proj) still finds its scales. Stored columns stand `col_step` elements
// apart (1 or 2; F32, F16 and BF16 only: gpt-oss interleaves gate and up).
//
// `cols` is a multiple of the unit, save that the last int32 of kInt4 may be partly used; so is
// `col_origin`, and block_cols where a grid's blocks are narrower than the view.
struct MatrixView {
  Format format = Format::kF32;
  bool transposed = false;
  ScaleType scale_type = ScaleType::kF32;
  int32_t col_step = 1;
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride_bytes = 0;            // kGPTQ: between rows of words, that is 8 rows
  const uint8_t* scale = nullptr;          // grid, row-major; null for formats without
  int64_t scale_row_stride_bytes = 0;
  int32_t block_rows = 128;
  int32_t block_cols = 128;
  int64_t row_origin = 0;
  int64_t col_origin = 0;
  const uint8_t* zeros = nullptr;          // kAWQ, kGPTQ: 8 columns an int32, a row a grid row
  int64_t zeros_row_stride_bytes = 0;
  const uint8_t* group_index = nullptr;    // kGPTQ: int32 [rows], grid row of each input; or null

  [[gnu::always_inline]] int64_t outputs() const { return transposed ? cols : rows; }
  [[gnu::always_inline]] int64_t inputs() const { return transposed ? rows : cols; }

  // Row of the scale grid that stored row `row` uses.
  [[gnu::always_inline]] int64_t grid_row(int64_t row) const {
    if (group_index == nullptr) return (row + row_origin) / block_rows;
    int32_t index;
    std::memcpy(&index, group_index + 4 * row, sizeof index);
    return index;
  }

  // Stored rows [begin, begin + count) as a view of their own; kGPTQ: multiples of 8.
  [[gnu::always_inline]] MatrixView row_slice(int64_t begin, int64_t count) const {
    MatrixView slice = *this;
    slice.data += (format == Format::kGPTQ ? begin / 8 : begin) * row_stride_bytes;
    slice.rows = count;
    slice.row_origin += begin;
    if (group_index != nullptr) slice.group_index += 4 * begin;
    return slice;
  }

  // Stored columns [begin, begin + count) as a view of their own; both are multiples of cut_of(),
  // save a kInt4 count that reaches the last column.
  [[gnu::always_inline]] MatrixView col_slice(int64_t begin, int64_t count) const {
    MatrixView slice = *this;
    const Unit unit = unit_of(format);
    slice.data += begin * col_step / unit.cols * unit.bytes;
    slice.cols = count;
    slice.col_origin += begin;
    return slice;
  }
};

}  // namespace moechat
