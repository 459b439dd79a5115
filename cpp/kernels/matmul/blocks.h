// How a product is cut into tasks: by the weight's shape alone, never by the number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {

constexpr int64_t kRowBlock = 32;             // weight rows a task, design 3.7
constexpr int64_t kBlockBytes = 32 * 1024;    // narrow matrices get more rows a task

// Weight rows of one decode task: a multiple of kRowBlock, at least about kBlockBytes.
inline int64_t rows_per_block(const MatrixView& w) {
  const int64_t row_bytes = w.cols * element_bytes(w.format);
  return std::max<int64_t>(1, kBlockBytes / (row_bytes * kRowBlock)) * kRowBlock;
}

inline int64_t num_blocks(const MatrixView& w) {
  return (w.rows + rows_per_block(w) - 1) / rows_per_block(w);
}

}  // namespace moechat
