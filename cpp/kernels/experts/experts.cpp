#include "kernels/experts/experts.h"

#include <algorithm>

#include "kernels/matmul/blocks.h"
#include "kernels/matmul/product.h"

namespace moechat {
namespace {

constexpr int64_t kPairsPerTask = 256;  // prefill: rows that share one decoded weight tile
constexpr int64_t kJoinedBytes = 2 << 20;  // what a task of all experts may read: under 0.5 ms
constexpr int64_t kJoinedExperts = 32;     // whose inputs a worker keeps

}  // namespace

void Experts::add_phases(Job& job, const ExpertsCall* call) {
  job.phases.push_back({[this, call] { return open_gate_up(*call); },
                        [this, call](int64_t task, int worker) {
                          run_gate_up(*call, task, worker);
                        },
                        "experts.gate_up"});
  job.phases.push_back({[this, call] { return open_down(*call); },
                        [this, call](int64_t task, int worker) {
                          if (joined_block_ > 0) return run_down_and_sum(*call, task, worker);
                          const Task* after = task_after(task);
                          run_down(*call, tasks_[static_cast<size_t>(task)], worker,
                                   after != nullptr ? &after->mlp->down : nullptr,
                                   after != nullptr ? after->row_begin : 0);
                        },
                        "experts.down"});
  job.phases.push_back({[this, call] { return open_sum(*call); },
                        [this, call](int64_t row, int) {
                          run_sum(*call, row, 0, call->dims->hidden);
                        },
                        "experts.sum"});
}

void Experts::group_pairs(const ExpertsCall& call) {
  const LayerWeights& layer = *call.layer;
  const MlpWeights* shared =
      !call.with_shared ? nullptr
                        : layer.is_moe ? (layer.has_shared ? &layer.shared : nullptr) : &layer.dense;
  const int64_t routed = layer.is_moe ? call.experts_per_token : 0;
  slots_per_row_ = routed + (shared != nullptr ? 1 : 0);
  group_of_.resize(layer.experts.size(), -1);
  groups_.clear();
  inner_ = shared != nullptr ? shared->gate.outputs() : 0;
  const int64_t num_routed = call.num_rows * routed;
  for (int64_t i = 0; i < num_routed; ++i) {
    const auto id = static_cast<size_t>(call.ids[i]);
    if (group_of_[id] < 0) {
      group_of_[id] = static_cast<int32_t>(groups_.size());
      groups_.push_back({&layer.experts[id], 0, 0, 0});
      inner_ = std::max(inner_, layer.experts[id].gate.outputs());
    }
    ++groups_[static_cast<size_t>(group_of_[id])].count;
  }
  int64_t first = 0;
  for (Group& group : groups_) {
    group.first = first;
    first += group.count;
    group.count = 0;
  }
  pairs_.resize(static_cast<size_t>(call.num_rows * slots_per_row_));
  for (int64_t i = 0; i < num_routed; ++i) {
    Group& group = groups_[static_cast<size_t>(group_of_[static_cast<size_t>(call.ids[i])])];
    pairs_[static_cast<size_t>(group.first + group.count++)] = {
        i / routed, i / routed * slots_per_row_ + i % routed};
  }
  for (int64_t i = 0; i < num_routed; ++i) group_of_[static_cast<size_t>(call.ids[i])] = -1;
  if (shared != nullptr) {
    groups_.push_back({shared, num_routed, call.num_rows, 0});
    for (int64_t r = 0; r < call.num_rows; ++r)
      pairs_[static_cast<size_t>(num_routed + r)] = {r, r * slots_per_row_ + routed};
  }
  const auto slots = pairs_.size();
  gate_.resize(slots * static_cast<size_t>(inner_));
  up_.resize(slots * static_cast<size_t>(inner_));
  out_.resize(slots * static_cast<size_t>(call.dims->hidden));
}

void Experts::name_inputs() {
  uint64_t name = new_input_names(groups_.size());
  for (Group& group : groups_) group.inputs = name++;
}

int64_t Experts::split(const ExpertsCall& call, MatrixView MlpWeights::*matrix) {
  tasks_.clear();
  const bool decode = call.num_rows <= kMaxGemvRows;
  for (const Group& group : groups_) {
    const MatrixView& w = group.mlp->*matrix;
    const int64_t block = decode ? outputs_per_block(w) : outputs_per_prefill_block(w);
    for (int64_t pair = 0; pair < group.count; pair += kPairsPerTask)
      for (int64_t row = 0; row < w.outputs(); row += block)
        tasks_.push_back({group.mlp, row, std::min(row + block, w.outputs()), group.first + pair,
                          std::min(kPairsPerTask, group.count - pair), group.inputs});
  }
  return static_cast<int64_t>(tasks_.size());
}

int64_t Experts::open_gate_up(const ExpertsCall& call) {
  group_pairs(call);
  name_inputs();
  return split(call, &MlpWeights::gate);
}

// Few experts: one task takes a block of outputs through all of them and sums, so that the sum
// costs no phase. Many: tasks would be too long.
int64_t Experts::open_down(const ExpertsCall& call) {
  name_inputs();
  joined_block_ = 0;
  if (call.num_rows <= kMaxGemvRows && !groups_.empty()) {
    const auto count = static_cast<int64_t>(groups_.size());
    const MatrixView& down = groups_[0].mlp->down;
    int64_t block = outputs_per_block(down);
    while (block > kRowBlock && block % (2 * kRowBlock) == 0 && !down.transposed &&
           block_bytes(down, block) * count > 2 * kBlockBytes)
      block /= 2;
    if (count <= kJoinedExperts && block_bytes(down, block) * count <= kJoinedBytes) {
      joined_block_ = block;
      return (call.dims->hidden + block - 1) / block;
    }
  }
  return split(call, &MlpWeights::down);
}

int64_t Experts::open_sum(const ExpertsCall& call) {
  return joined_block_ > 0 ? 0 : call.num_rows;
}

// `next`: the matrix whose rows from next_row on this worker will probably read then, or null.
void Experts::product(const ExpertsCall& call, const MatrixView& w, const Task& task,
                      const float* const* x, float* const* y, int worker, const MatrixView* next,
                      int64_t next_row) {
  KeptInputs* kept = pool_.kept_inputs(worker, task.inputs);
  if (next != nullptr) kept->expect(*next, next_row);
  multiply(*isa_.matmul, w, task.row_begin, task.row_end, call.compute, x, task.count, y,
           pool_.scratch(worker), kept);
}

// What the worker of a task will probably run next: all workers take turns.
const Experts::Task* Experts::task_after(int64_t index) const {
  const int64_t after = index + pool_.num_threads();
  return after < static_cast<int64_t>(tasks_.size()) ? &tasks_[static_cast<size_t>(after)] : nullptr;
}

// gate[begin, end) = the activation of gate and up there.
void Experts::activate(const ModelDims& dims, const MlpWeights& mlp, int64_t begin, int64_t end,
                       float* gate, float* up) {
  const VectorKernels& vector = *isa_.vector;
  const int64_t n = end - begin;
  gate += begin;
  up += begin;
  if (!mlp.gate_bias.empty()) vector.axpy(1.0f, mlp.gate_bias.data() + begin, n, gate);
  if (!mlp.up_bias.empty()) vector.axpy(1.0f, mlp.up_bias.data() + begin, n, up);
  switch (dims.activation) {
    case Activation::kSilu: return vector.silu_mul(gate, up, n, gate);
    case Activation::kGeluTanh: return vector.gelu_tanh_mul(gate, up, n, gate);
    case Activation::kSwigluClamped:
      return vector.swiglu_clamped(gate, up, dims.activation_limit, dims.activation_alpha, n, gate);
  }
}

void Experts::run_gate_up(const ExpertsCall& call, int64_t index, int worker) {
  const Task& task = tasks_[static_cast<size_t>(index)];
  const float* x[kPairsPerTask];
  float* gate[kPairsPerTask];
  float* up[kPairsPerTask];
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = pairs_[static_cast<size_t>(task.first + i)];
    x[i] = call.x + pair.row * call.dims->hidden;
    gate[i] = gate_.data() + pair.slot * inner_;
    up[i] = up_.data() + pair.slot * inner_;
  }
  const Task* after = task_after(index);
  product(call, task.mlp->gate, task, x, gate, worker, &task.mlp->up, task.row_begin);
  product(call, task.mlp->up, task, x, up, worker, after != nullptr ? &after->mlp->gate : nullptr,
          after != nullptr ? after->row_begin : 0);
  for (int64_t i = 0; i < task.count; ++i)
    activate(*call.dims, *task.mlp, task.row_begin, task.row_end, gate[i], up[i]);
}

void Experts::run_down(const ExpertsCall& call, const Task& task, int worker,
                       const MatrixView* next, int64_t next_row) {
  const float* x[kPairsPerTask];
  float* y[kPairsPerTask];
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = pairs_[static_cast<size_t>(task.first + i)];
    x[i] = gate_.data() + pair.slot * inner_;
    y[i] = out_.data() + pair.slot * call.dims->hidden;
  }
  product(call, task.mlp->down, task, x, y, worker, next, next_row);
  const std::vector<float>& bias = task.mlp->down_bias;
  if (bias.empty()) return;
  for (int64_t i = 0; i < task.count; ++i)
    isa_.vector->axpy(1.0f, bias.data() + task.row_begin, task.row_end - task.row_begin,
                      y[i] + task.row_begin);
}

void Experts::run_down_and_sum(const ExpertsCall& call, int64_t block, int worker) {
  const int64_t begin = block * joined_block_;
  const int64_t end = std::min(begin + joined_block_, call.dims->hidden);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const bool last = g + 1 == groups_.size();
    run_down(call, {group.mlp, begin, end, group.first, group.count, group.inputs}, worker,
             &groups_[last ? 0 : g + 1].mlp->down,
             last ? begin + pool_.num_threads() * joined_block_ : begin);
  }
  for (int64_t r = 0; r < call.num_rows; ++r) run_sum(call, r, begin, end);
}

// Elements [begin, end) of row `row` of y, in slot order.
void Experts::run_sum(const ExpertsCall& call, int64_t row, int64_t begin, int64_t end) {
  const int64_t routed = call.layer->is_moe ? call.experts_per_token : 0;
  const int64_t hidden = call.dims->hidden, n = end - begin;
  const float shared = call.shared_weights != nullptr ? call.shared_weights[row] : 1.0f;
  float* y = call.y + row * hidden + begin;
  if (!call.accumulate) std::fill(y, y + n, 0.0f);
  for (int64_t k = 0; k < slots_per_row_; ++k)
    isa_.vector->axpy(k < routed ? call.weights[row * routed + k] : shared,
                      out_.data() + (row * slots_per_row_ + k) * hidden + begin, n, y);
}

}  // namespace moechat
