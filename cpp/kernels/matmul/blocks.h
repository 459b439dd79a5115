// How a product is cut into tasks: by the weight's shape alone, never by the number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {

constexpr int64_t kRowBlock = 32;             // outputs a task, design 3.7
constexpr int64_t kBlockBytes = 32 * 1024;    // narrow matrices get more outputs a task
constexpr int64_t kTransposedBlock = 128;     // a task reads whole cache lines of every stored row

// Stored bytes of `outputs` outputs, scales in grids left out; at least 1.
inline int64_t block_bytes(const MatrixView& w, int64_t outputs) {
  const Unit unit = unit_of(w.format);
  const int64_t stored = w.format == Format::kGPTQ ? w.inputs() / 8 : w.inputs();
  return std::max<int64_t>(1, stored * unit.bytes / unit.cols) * outputs;
}

// Outputs of one decode task: a multiple of kRowBlock, at least about kBlockBytes.
inline int64_t outputs_per_block(const MatrixView& w) {
  const int64_t block = w.transposed ? kTransposedBlock : kRowBlock;
  return std::max<int64_t>(1, kBlockBytes / block_bytes(w, block)) * block;
}

// Outputs of one prefill task. Its inputs are packed once for all of them, which large matrices can
// afford without leaving workers idle.
inline int64_t outputs_per_prefill_block(const MatrixView& w) {
  return w.outputs() >= 2048 ? 8 * kRowBlock : 4 * kRowBlock;
}

inline int64_t num_blocks(const MatrixView& w) {
  return (w.outputs() + outputs_per_block(w) - 1) / outputs_per_block(w);
}

}  // namespace moechat
