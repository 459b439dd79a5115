// One weight of any format: the plain definition that every decoder is checked against. Not for
// files that are compiled for an instruction set.
//
// Layouts: OCP Microscaling Formats specification 1.0; compressed-tensors "pack-quantized"; AutoAWQ
// GEMM; AutoGPTQ version 1; ggml's block formats.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"
#include "common/number_formats.h"
#include "kernels/matmul/groups.h"

namespace moechat {

// The grid's scale of a stored element.
[[gnu::always_inline]] inline float scale_at(const MatrixView& w, int64_t row, int64_t col) {
  const uint8_t* p = w.scale + w.grid_row(row) * w.scale_row_stride_bytes;
  return load_scale(w.scale_type, p, (col + w.col_origin) / w.block_cols);
}

// Nibble i of a run of bytes, the low one first.
[[gnu::always_inline]] inline uint32_t nibble_at(const uint8_t* p, int64_t i) {
  return (p[i / 2] >> (i % 2 * 4)) & 15u;
}

// The nibble of an int32 that AWQ keeps output j of eight in.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Nibble k of a block whose low nibbles hold its first half.
[[gnu::always_inline]] inline uint32_t half_nibble(const uint8_t* p, int64_t k, int64_t half) {
  return k < half ? p[k] & 15u : p[k - half] >> 4;
}

// Scale and minimum of sub-block j of kQ4_K and kQ5_K: 6 bits each, of which the last four
// sub-blocks keep two in the upper bits of the first four.
struct ScaleAndMinimum {
  uint32_t scale, minimum;
};
[[gnu::always_inline]] inline ScaleAndMinimum scale_and_minimum(const uint8_t* p, int64_t j) {
  if (j < 4) return {p[j] & 63u, p[j + 4] & 63u};
  const uint32_t both = p[j + 4];
  return {(both & 15u) | (p[j - 4] & 0xc0u) >> 2, (both >> 4) | (p[j] & 0xc0u) >> 2};
}

[[gnu::always_inline]] inline float q4_k_at(const uint8_t* block, int64_t k) {
  const auto [scale, minimum] = scale_and_minimum(block + 4, k / 32);
  const uint32_t code = half_nibble(block + 16 + k / 64 * 32, k % 64, 32);
  return f16_to_f32(load_u16(block)) * static_cast<float>(scale * code) -
         f16_to_f32(load_u16(block + 2)) * static_cast<float>(minimum);
}

[[gnu::always_inline]] inline float q5_k_at(const uint8_t* block, int64_t k) {
  const auto [scale, minimum] = scale_and_minimum(block + 4, k / 32);
  const uint32_t fifth = (block[16 + k % 32] >> (k / 32)) & 1u;
  const uint32_t code = half_nibble(block + 48 + k / 64 * 32, k % 64, 32) | fifth << 4;
  return f16_to_f32(load_u16(block)) * static_cast<float>(scale * code) -
         f16_to_f32(load_u16(block + 2)) * static_cast<float>(minimum);
}

// Each half of 128: 64 bytes of low nibbles, 32 bytes of upper bit pairs.
[[gnu::always_inline]] inline float q6_k_at(const uint8_t* block, int64_t k) {
  const int64_t half = k / 128, i = k % 128;
  const uint32_t low = half_nibble(block + half * 64, i, 64);
  const uint32_t high = (block[128 + half * 32 + i % 32] >> (i / 32 * 2)) & 3u;
  const int32_t code = static_cast<int32_t>(low | high << 4) - 32;
  const int32_t scale = static_cast<int8_t>(block[192 + k / 16]);
  return f16_to_f32(load_u16(block + 208)) * static_cast<float>(scale * code);
}

template <Format kFormat>
[[gnu::always_inline]] inline float weight_at(const MatrixView& w, int64_t row, int64_t col) {
  const int64_t stored_row = kFormat == Format::kGPTQ ? row / 8 : row;
  const uint8_t* p = w.data + stored_row * w.row_stride_bytes;
  constexpr Unit kUnit = unit_of(kFormat);
  if constexpr (kUnit.cols >= 32) {
    const uint8_t* block = p + col / kUnit.cols * kUnit.bytes;
    const int64_t k = col % kUnit.cols;
    if constexpr (kFormat == Format::kQ4_K) return q4_k_at(block, k);
    if constexpr (kFormat == Format::kQ5_K) return q5_k_at(block, k);
    if constexpr (kFormat == Format::kQ6_K) return q6_k_at(block, k);
    if constexpr (kFormat == Format::kMXFP4Block)
      return e2m1_to_f32(half_nibble(block + 1, k, 16)) * e8m0_to_f32(*block);
    const float scale = f16_to_f32(load_u16(block));
    int32_t code = 0;
    if constexpr (kFormat == Format::kQ8_0) code = static_cast<int8_t>(block[2 + k]);
    if constexpr (kFormat == Format::kQ4_0)
      code = static_cast<int32_t>(half_nibble(block + 2, k, 16)) - 8;
    if constexpr (kFormat == Format::kQ5_0) {
      const uint32_t fifth = (load_u32(block + 2) >> k) & 1u;
      code = static_cast<int32_t>(half_nibble(block + 6, k, 16) | fifth << 4) - 16;
    }
    return scale * static_cast<float>(code);
  }
  if constexpr (kFormat == Format::kF32) return load_f32(p + 4 * col * w.col_step);
  if constexpr (kFormat == Format::kF16) return f16_to_f32(load_u16(p + 2 * col * w.col_step));
  if constexpr (kFormat == Format::kBF16) return bf16_to_f32(load_u16(p + 2 * col * w.col_step));
  const float scale = scale_at(w, row, col);
  if constexpr (kFormat == Format::kFP8) return fp8_e4m3_to_f32(p[col]) * scale;
  if constexpr (kFormat == Format::kMXFP4) return e2m1_to_f32(nibble_at(p, col)) * scale;
  int32_t code = 0, zero = 8;
  if constexpr (kFormat == Format::kInt4) code = static_cast<int32_t>(nibble_at(p, col));
  if constexpr (kFormat == Format::kAWQ || kFormat == Format::kGPTQ) {
    const uint8_t* zeros = w.zeros + w.grid_row(row) * w.zeros_row_stride_bytes;
    const int64_t zero_col = col + w.col_origin;
    if constexpr (kFormat == Format::kAWQ) {
      code = static_cast<int32_t>(nibble_at(p + col / 8 * 4, kAwqNibble[col % 8]));
      zero = static_cast<int32_t>(nibble_at(zeros + zero_col / 8 * 4, kAwqNibble[zero_col % 8]));
    } else {
      code = static_cast<int32_t>(nibble_at(p + 4 * col, row % 8));
      zero = static_cast<int32_t>(nibble_at(zeros, zero_col)) + 1;
    }
  }
  return static_cast<float>(code - zero) * scale;
}

}  // namespace moechat
