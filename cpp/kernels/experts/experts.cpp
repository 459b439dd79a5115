#include "kernels/experts/experts.h"

#include <algorithm>

#include "kernels/matmul/blocks.h"
#include "kernels/matmul/product.h"

namespace moechat {
namespace {

constexpr int64_t kPairsPerTask = 256;  // prefill: rows that share one decoded weight tile
constexpr int64_t kJoinedBytes = 2 << 20;  // what a task of all experts may read: under 0.5 ms
constexpr int64_t kJoinedExperts = 32;     // whose inputs a worker keeps

// The matrices of an MLP's part. One that is not resident is part 0 as a whole.
struct Part {
  const MatrixView& gate;
  const MatrixView& up;
  const MatrixView& down;
  int64_t begin;
};

Part part_of(const MlpWeights& mlp, int64_t part) {
  if (mlp.parts.empty()) return {mlp.gate, mlp.up, mlp.down, 0};
  const MlpPart& own = mlp.parts[static_cast<size_t>(part)];
  return {own.gate, own.up, own.down, own.begin};
}

bool has_part(const MlpWeights& mlp, int64_t part) {
  return mlp.parts.empty() ? part == 0 : !mlp.parts[static_cast<size_t>(part)].empty();
}

}  // namespace

void Experts::add_phases(Job& job, const ExpertsCall* call) {
  job.phases.push_back({[this, call] { return open_gate_up(*call); },
                        [this, call](int64_t task, int worker) {
                          run_gate_up(*call, task, worker);
                        },
                        "experts.gate_up", &node_begin_});
  job.phases.push_back({[this, call] { return open_down(*call); },
                        [this, call](int64_t task, int worker) {
                          if (joined_block_ > 0) return run_down_and_sum(*call, task, worker);
                          const Task* after = task_after(task);
                          run_down(*call, tasks_[static_cast<size_t>(task)], worker,
                                   after != nullptr ? &part_of(*after->mlp, after->part).down
                                                    : nullptr,
                                   after != nullptr ? after->row_begin : 0);
                        },
                        "experts.down", &node_begin_});
  job.phases.push_back({[this, call] { return open_sum(*call); },
                        [this, call](int64_t row, int) { run_sum(*call, row); },
                        "experts.sum"});
}

void Experts::group_pairs(const ExpertsCall& call) {
  const LayerWeights& layer = *call.layer;
  const MlpWeights* shared =
      !call.with_shared ? nullptr
                        : layer.is_moe ? (layer.has_shared ? &layer.shared : nullptr) : &layer.dense;
  const int64_t routed = layer.is_moe ? call.experts_per_token : 0;
  slots_per_row_ = routed + (shared != nullptr ? 1 : 0);
  num_parts_ = layer.num_parts;
  group_of_.resize(layer.experts.size(), -1);
  groups_.clear();
  inner_ = shared != nullptr ? shared->gate.outputs() : 0;
  const int64_t num_routed = call.num_rows * routed;
  for (int64_t i = 0; i < num_routed; ++i) {
    if (call.ids[i] == kNoExpert) continue;
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
    if (call.ids[i] == kNoExpert) continue;
    Group& group = groups_[static_cast<size_t>(group_of_[static_cast<size_t>(call.ids[i])])];
    pairs_[static_cast<size_t>(group.first + group.count++)] = {
        i / routed, i / routed * slots_per_row_ + i % routed};
  }
  for (int64_t i = 0; i < num_routed; ++i)
    if (call.ids[i] != kNoExpert) group_of_[static_cast<size_t>(call.ids[i])] = -1;
  if (shared != nullptr) {
    groups_.push_back({shared, first, call.num_rows, 0});
    for (int64_t r = 0; r < call.num_rows; ++r)
      pairs_[static_cast<size_t>(first + r)] = {r, r * slots_per_row_ + routed};
  }
  const auto slots = pairs_.size();
  gate_.resize(slots * static_cast<size_t>(inner_));
  up_.resize(slots * static_cast<size_t>(inner_));
  const auto parts = static_cast<size_t>(num_parts_);
  const auto hidden = static_cast<size_t>(call.dims->hidden);
  out_.resize(parts * slots * hidden);
  if (parts > 1) partial_.resize(parts * static_cast<size_t>(call.num_rows) * hidden);
}

void Experts::name_inputs() {
  uint64_t name = new_input_names(groups_.size() * static_cast<size_t>(num_parts_));
  for (Group& group : groups_) group.inputs = name++;
}

// Every part has inputs of its own.
uint64_t Experts::inputs_of_down(const Group& group, int64_t part) const {
  return group.inputs + static_cast<uint64_t>(part) * groups_.size();
}

int64_t Experts::split(const ExpertsCall& call, bool down) {
  tasks_.clear();
  node_begin_.clear();
  const bool decode = call.num_rows <= kMaxGemvRows;
  int64_t row_tasks = 0;
  for (const Group& group : groups_)
    row_tasks += (group.count + kPairsPerTask - 1) / kPairsPerTask;
  for (int64_t part = 0; part < num_parts_; ++part) {
    node_begin_.push_back(static_cast<int64_t>(tasks_.size()));
    for (const Group& group : groups_) {
      if (!has_part(*group.mlp, part)) continue;
      const Part own = part_of(*group.mlp, part);
      const MatrixView& w = down ? own.down : own.gate;
      const uint64_t inputs = down ? inputs_of_down(group, part) : group.inputs;
      for (int64_t pair = 0; pair < group.count; pair += kPairsPerTask) {
        const int64_t count = std::min(kPairsPerTask, group.count - pair);
        const int64_t block = decode ? outputs_per_block(w)
                                     : outputs_per_prefill_block(w, count, row_tasks);
        for (int64_t row = 0; row < w.outputs(); row += block)
          tasks_.push_back({group.mlp, part, row, std::min(row + block, w.outputs()),
                            group.first + pair, count, inputs});
      }
    }
  }
  if (num_parts_ != pool_.topology().num_nodes()) node_begin_.clear();
  return static_cast<int64_t>(tasks_.size());
}

int64_t Experts::open_gate_up(const ExpertsCall& call) {
  group_pairs(call);
  name_inputs();
  return split(call, /*down=*/false);
}

// Few experts: one task takes a block of outputs through all of them and sums, so that the sum
// costs no phase. Many: tasks would be too long.
int64_t Experts::open_down(const ExpertsCall& call) {
  name_inputs();
  joined_block_ = 0;
  if (call.num_rows <= kMaxGemvRows && !groups_.empty()) {
    const auto count = static_cast<int64_t>(groups_.size());
    const MatrixView& down = part_of(*groups_[0].mlp, 0).down;
    int64_t block = outputs_per_block(down);
    while (block > kRowBlock && block % (2 * kRowBlock) == 0 && !down.transposed &&
           block_bytes(down, block) * count > 2 * kBlockBytes)
      block /= 2;
    if (count <= kJoinedExperts && block_bytes(down, block) * count <= kJoinedBytes) {
      joined_block_ = block;
      const int64_t blocks = (call.dims->hidden + block - 1) / block;
      node_begin_.clear();
      if (num_parts_ == pool_.topology().num_nodes())
        for (int64_t part = 0; part < num_parts_; ++part) node_begin_.push_back(part * blocks);
      return num_parts_ * blocks;
    }
  }
  return split(call, /*down=*/true);
}

int64_t Experts::open_sum(const ExpertsCall& call) {
  return joined_block_ > 0 && num_parts_ == 1 ? 0 : call.num_rows;
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

// Workers that take their turns at the tasks of a node, or at all.
int64_t Experts::num_takers() const {
  const int64_t threads = pool_.num_threads();
  return node_begin_.empty() ? threads : std::max<int64_t>(1, threads / num_parts_);
}

// What the worker of a task will probably run next: all workers take turns.
const Experts::Task* Experts::task_after(int64_t index) const {
  const int64_t after = index + num_takers();
  return after < static_cast<int64_t>(tasks_.size()) ? &tasks_[static_cast<size_t>(after)] : nullptr;
}

// gate[begin, end) = the activation of gate and up there; inner elements of the whole MLP.
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
  const Part part = part_of(*task.mlp, task.part);
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = pairs_[static_cast<size_t>(task.first + i)];
    x[i] = call.x + pair.row * call.dims->hidden;
    gate[i] = gate_.data() + pair.slot * inner_ + part.begin;
    up[i] = up_.data() + pair.slot * inner_ + part.begin;
  }
  const Task* after = task_after(index);
  product(call, part.gate, task, x, gate, worker, &part.up, task.row_begin);
  product(call, part.up, task, x, up, worker,
          after != nullptr ? &part_of(*after->mlp, after->part).gate : nullptr,
          after != nullptr ? after->row_begin : 0);
  for (int64_t i = 0; i < task.count; ++i)
    activate(*call.dims, *task.mlp, part.begin + task.row_begin, part.begin + task.row_end,
             gate[i] - part.begin, up[i] - part.begin);
}

float* Experts::output(const ExpertsCall& call, int64_t part, int64_t slot) {
  const auto slots = static_cast<int64_t>(pairs_.size());
  return out_.data() + (part * slots + slot) * call.dims->hidden;
}

float* Experts::partial(const ExpertsCall& call, int64_t part, int64_t row) {
  return partial_.data() + (part * call.num_rows + row) * call.dims->hidden;
}

void Experts::run_down(const ExpertsCall& call, const Task& task, int worker,
                       const MatrixView* next, int64_t next_row) {
  const float* x[kPairsPerTask];
  float* y[kPairsPerTask];
  const Part part = part_of(*task.mlp, task.part);
  for (int64_t i = 0; i < task.count; ++i) {
    const Pair& pair = pairs_[static_cast<size_t>(task.first + i)];
    x[i] = gate_.data() + pair.slot * inner_ + part.begin;
    y[i] = output(call, task.part, pair.slot);
  }
  product(call, part.down, task, x, y, worker, next, next_row);
  const std::vector<float>& bias = task.mlp->down_bias;
  if (bias.empty() || task.part > 0) return;  // part 0 adds it for all
  for (int64_t i = 0; i < task.count; ++i)
    isa_.vector->axpy(1.0f, bias.data() + task.row_begin, task.row_end - task.row_begin,
                      y[i] + task.row_begin);
}

void Experts::run_down_and_sum(const ExpertsCall& call, int64_t task, int worker) {
  const int64_t hidden = call.dims->hidden;
  const int64_t blocks = (hidden + joined_block_ - 1) / joined_block_;
  const int64_t part = task / blocks, begin = task % blocks * joined_block_;
  const int64_t end = std::min(begin + joined_block_, hidden);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    if (!has_part(*group.mlp, part)) continue;
    const bool last = g + 1 == groups_.size();
    const MlpWeights& next = *groups_[last ? 0 : g + 1].mlp;
    run_down(call,
             {group.mlp, part, begin, end, group.first, group.count, inputs_of_down(group, part)},
             worker, has_part(next, part) ? &part_of(next, part).down : nullptr,
             last ? begin + num_takers() * joined_block_ : begin);
  }
  for (int64_t r = 0; r < call.num_rows; ++r) sum_slots(call, part, r, begin, end);
}

const MlpWeights& Experts::mlp_of(const ExpertsCall& call, int64_t row, int64_t k) const {
  const LayerWeights& layer = *call.layer;
  if (!layer.is_moe) return layer.dense;
  if (k == call.experts_per_token) return layer.shared;
  return layer.experts[static_cast<size_t>(call.ids[row * call.experts_per_token + k])];
}

// Elements [begin, end) of a row's sum over the slots, in their order: of y when there is but one
// part, else of the part's own sum.
void Experts::sum_slots(const ExpertsCall& call, int64_t part, int64_t row, int64_t begin,
                        int64_t end) {
  const int64_t routed = call.layer->is_moe ? call.experts_per_token : 0;
  const float shared = call.shared_weights != nullptr ? call.shared_weights[row] : 1.0f;
  const bool whole = num_parts_ == 1;
  float* y = (whole ? call.y + row * call.dims->hidden : partial(call, part, row)) + begin;
  if (!(whole && call.accumulate)) std::fill(y, y + (end - begin), 0.0f);
  for (int64_t k = 0; k < slots_per_row_; ++k) {
    if (k < routed && call.ids[row * routed + k] == kNoExpert) continue;
    if (has_part(mlp_of(call, row, k), part))
      isa_.vector->axpy(k < routed ? call.weights[row * routed + k] : shared,
                        output(call, part, row * slots_per_row_ + k) + begin, end - begin, y);
  }
}

// What is left of a row when its slots, its parts, or both are still to be summed.
void Experts::run_sum(const ExpertsCall& call, int64_t row) {
  const int64_t hidden = call.dims->hidden;
  if (joined_block_ == 0)
    for (int64_t part = 0; part < num_parts_; ++part) sum_slots(call, part, row, 0, hidden);
  if (num_parts_ == 1) return;
  float* y = call.y + row * hidden;
  if (!call.accumulate) std::fill(y, y + hidden, 0.0f);
  for (int64_t part = 0; part < num_parts_; ++part)
    isa_.vector->axpy(1.0f, partial(call, part, row), hidden, y);
}

}  // namespace moechat
