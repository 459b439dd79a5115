// How a product is cut into tasks: by the shapes alone, never by the number of threads.
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

constexpr int64_t kPrefillBlock = 4 * kRowBlock;
constexpr int64_t kPrefillTasks = 128;             // of a phase: enough for workers to end together
constexpr int64_t kMaxPrefillOutputs = 2048;
constexpr int64_t kMaxPrefillProducts = 1 << 18;   // rows times outputs: no task is very long

// Outputs of one prefill task of `num_rows` rows, in a phase that has `num_row_tasks` such groups
// of rows. Inputs are packed anew for every task, so tasks are as large as workers can afford.
// kMXFP4 is multiplied in one way or another by what its rows hold, hence always cut alike.
inline int64_t outputs_per_prefill_block(const MatrixView& w, int64_t num_rows,
                                         int64_t num_row_tasks) {
  if (w.transposed || w.format == Format::kMXFP4)
    return w.outputs() >= 2048 ? 2 * kPrefillBlock : kPrefillBlock;
  const int64_t outputs =
      std::min({w.outputs() * num_row_tasks / kPrefillTasks, kMaxPrefillOutputs,
                kMaxPrefillProducts / std::max<int64_t>(1, num_rows)});
  return std::max<int64_t>(1, outputs / kPrefillBlock) * kPrefillBlock;
}

inline int64_t num_blocks(const MatrixView& w) {
  return (w.outputs() + outputs_per_block(w) - 1) / outputs_per_block(w);
}

}  // namespace moechat
