// What the attention of one layer reads and writes in prefill, of either kind.
//
// Shapes: T new tokens at slots [n - T, n); n keys; H heads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention/attend_block.h"
#include "model/model.h"

namespace moechat {

struct PrefillAttentionCall {
  const LayerWeights* layer = nullptr;
  int64_t num_keys = 0;              // n, of this layer
  const float* slots = nullptr;      // [n][kv_width]: float32 values of the cache's own encoding
  const float* cos_sin = nullptr;    // of this layer's rope, cos_sin_stride apart for the T tokens
  int64_t cos_sin_stride = 0;
  const int64_t* visible_begin = nullptr;  // [T] first slot that each token sees; null: 0
  float* values = nullptr;           // [T][H * value_dim], the result
  float* head_mass = nullptr;        // [H][n] zeroed, or null: see Prefill::run_layer
  int64_t mass_window = 0;           // of how many last queries; at most T

  const float* sink(int64_t head) const {
    return layer->sinks.empty() ? nullptr : layer->sinks.data() + head;
  }
};

// `rows` float32 rows as a matrix.
inline MatrixView float_rows(const float* data, int64_t rows, int64_t cols, int64_t stride) {
  MatrixView view;
  view.format = Format::kF32;
  view.rows = rows;
  view.cols = cols;
  view.row_stride_bytes = 4 * stride;
  view.data = reinterpret_cast<const uint8_t*>(data);
  return view;
}

inline int64_t ceil_div(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace moechat
