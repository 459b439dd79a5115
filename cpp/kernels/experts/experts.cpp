#include "kernels/experts/experts.h"

#include <algorithm>

#include "kernels/matmul/blocks.h"
#include "kernels/matmul/product.h"

namespace moechat {
namespace {

constexpr int64_t kPairsPerTask = 256;        // prefill: rows that share one decoded weight tile
constexpr int64_t kSerialSumFloats = 1 << 15;  // below this a phase costs more than the sum

}  // namespace

void Experts::add_phases(Job& job, const ExpertsCall* call) {
  job.phases.push_back({[this, call] { return open_gate_up(*call); },
                        [this, call](int64_t task, int worker) {
                          run_gate_up(*call, tasks_[static_cast<size_t>(task)], worker);
                        }});
  job.phases.push_back({[this, call] { return open_down(*call); },
                        [this, call](int64_t task, int worker) {
                          run_down(*call, tasks_[static_cast<size_t>(task)], worker);
                        }});
  job.phases.push_back({[this, call]() -> int64_t {
                          if (call->num_rows * slots_per_row_ * call->dims->hidden > kSerialSumFloats)
                            return (call->num_rows + kRowBlock - 1) / kRowBlock;
                          run_sum(*call, 0, call->num_rows);
                          return 0;
                        },
                        [this, call](int64_t task, int) {
                          const int64_t begin = task * kRowBlock;
                          run_sum(*call, begin, std::min(begin + kRowBlock, call->num_rows));
                        }});
}

void Experts::group_pairs(const ExpertsCall& call) {
  const LayerWeights& layer = *call.layer;
  const MlpWeights* shared =
      !call.with_shared ? nullptr
                        : layer.is_moe ? (layer.has_shared ? &layer.shared : nullptr) : &layer.dense;
  const int64_t routed = layer.is_moe ? call.experts_per_token : 0;
  slots_per_row_ = routed + (shared != nullptr ? 1 : 0);
  groups_.resize(layer.experts.size() + 1);
  for (Group& group : groups_) group.pairs.clear();
  inner_ = shared != nullptr ? shared->gate.outputs() : 0;
  for (int64_t r = 0; r < call.num_rows; ++r)
    for (int64_t k = 0; k < routed; ++k) {
      const auto id = static_cast<size_t>(call.ids[r * routed + k]);
      groups_[id].mlp = &layer.experts[id];
      groups_[id].pairs.push_back({r, r * slots_per_row_ + k});
      inner_ = std::max(inner_, layer.experts[id].gate.outputs());
    }
  if (shared != nullptr) {
    groups_.back().mlp = shared;
    for (int64_t r = 0; r < call.num_rows; ++r)
      groups_.back().pairs.push_back({r, r * slots_per_row_ + routed});
  }
  const auto slots = static_cast<size_t>(call.num_rows * slots_per_row_);
  gate_.resize(slots * static_cast<size_t>(inner_));
  up_.resize(slots * static_cast<size_t>(inner_));
  out_.resize(slots * static_cast<size_t>(call.dims->hidden));
}

int64_t Experts::split(const ExpertsCall& call, MatrixView MlpWeights::*matrix) {
  tasks_.clear();
  const bool decode = call.num_rows <= kMaxGemvRows;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto pairs = static_cast<int64_t>(groups_[g].pairs.size());
    if (pairs == 0) continue;
    const MatrixView& w = groups_[g].mlp->*matrix;
    const int64_t block = decode ? outputs_per_block(w) : 4 * kRowBlock;
    for (int64_t first = 0; first < pairs; first += kPairsPerTask)
      for (int64_t row = 0; row < w.outputs(); row += block)
        tasks_.push_back({static_cast<int64_t>(g), row, std::min(row + block, w.outputs()), first,
                          std::min(kPairsPerTask, pairs - first)});
  }
  return static_cast<int64_t>(tasks_.size());
}

int64_t Experts::open_gate_up(const ExpertsCall& call) {
  group_pairs(call);
  return split(call, &MlpWeights::gate);
}

int64_t Experts::open_down(const ExpertsCall& call) { return split(call, &MlpWeights::down); }

void Experts::product(const ExpertsCall& call, const MatrixView& w, const Task& task,
                      const float* const* x, float* const* y, int worker) {
  void* scratch = pool_.scratch(worker);
  multiply(*isa_.matmul, w, task.row_begin, task.row_end, call.compute, x, task.count, y, scratch);
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

void Experts::run_gate_up(const ExpertsCall& call, const Task& task, int worker) {
  const Group& group = groups_[static_cast<size_t>(task.group)];
  const float* x[kPairsPerTask];
  float* gate[kPairsPerTask];
  float* up[kPairsPerTask];
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = group.pairs[static_cast<size_t>(task.first + i)];
    x[i] = call.x + pair.row * call.dims->hidden;
    gate[i] = gate_.data() + pair.slot * inner_;
    up[i] = up_.data() + pair.slot * inner_;
  }
  product(call, group.mlp->gate, task, x, gate, worker);
  product(call, group.mlp->up, task, x, up, worker);
  for (int64_t i = 0; i < task.count; ++i)
    activate(*call.dims, *group.mlp, task.row_begin, task.row_end, gate[i], up[i]);
}

void Experts::run_down(const ExpertsCall& call, const Task& task, int worker) {
  const Group& group = groups_[static_cast<size_t>(task.group)];
  const float* x[kPairsPerTask];
  float* y[kPairsPerTask];
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = group.pairs[static_cast<size_t>(task.first + i)];
    x[i] = gate_.data() + pair.slot * inner_;
    y[i] = out_.data() + pair.slot * call.dims->hidden;
  }
  product(call, group.mlp->down, task, x, y, worker);
  const std::vector<float>& bias = group.mlp->down_bias;
  if (bias.empty()) return;
  for (int64_t i = 0; i < task.count; ++i)
    isa_.vector->axpy(1.0f, bias.data() + task.row_begin, task.row_end - task.row_begin,
                      y[i] + task.row_begin);
}

void Experts::run_sum(const ExpertsCall& call, int64_t row_begin, int64_t row_end) {
  const int64_t routed = call.layer->is_moe ? call.experts_per_token : 0;
  const int64_t hidden = call.dims->hidden;
  for (int64_t r = row_begin; r < row_end; ++r) {
    const float shared = call.shared_weights != nullptr ? call.shared_weights[r] : 1.0f;
    float* y = call.y + r * hidden;
    if (!call.accumulate) std::fill(y, y + hidden, 0.0f);
    for (int64_t k = 0; k < slots_per_row_; ++k)
      isa_.vector->axpy(k < routed ? call.weights[r * routed + k] : shared,
                        out_.data() + (r * slots_per_row_ + k) * hidden, hidden, y);
  }
}

}  // namespace moechat
