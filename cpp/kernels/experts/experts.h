// Routed experts, with the shared expert beside them (design 3.2):
//   y[r] = sum_k weight[r][k] * mlp(expert id[r][k], x[r])  (+ shared weight[r] * mlp(shared, x[r])),
// in slot order.
// A dense layer is the same with no routed expert and the MLP as the shared one.
//
// Decode class (<= kMaxGemvRows rows): each weight is decoded once for all rows that use it, and a
// row's bits do not depend on the others. Prefill class (any number of rows): tokens are grouped by
// expert.
//
// Resident weights (resident.h) are computed part by part, each by the workers of its node if they
// can: out = sum over parts, in node order, of the sums over slots. A row's bits then depend on the
// number of parts, too.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/threads.h"
#include "model/model.h"

namespace moechat {

constexpr int32_t kNoExpert = -1;

struct ExpertsCall {
  const ModelDims* dims = nullptr;
  const LayerWeights* layer = nullptr;
  Compute compute = Compute::kBF16;
  bool with_shared = true;
  int64_t num_rows = 0, experts_per_token = 0;
  const float* x = nullptr;         // [num_rows][hidden], normalised input
  const int32_t* ids = nullptr;     // [num_rows][experts_per_token], distinct in a row, or kNoExpert
  const float* weights = nullptr;   // [num_rows][experts_per_token]
  const float* shared_weights = nullptr;  // [num_rows]; null: 1
  float* y = nullptr;               // [num_rows][hidden]; overwritten, or added to
  bool accumulate = false;          // y += instead of y =
};

// Buffers of one caller, kept between calls. Appends the phases of one call to a job; the call's
// fields are read when its phases open, so they may be filled in by an earlier phase.
class Experts {
 public:
  Experts(const InstructionSet& isa, ThreadPool& pool) : isa_(isa), pool_(pool) {}
  void add_phases(Job& job, const ExpertsCall* call);

 private:
  // A row and the place of its result among all rows' slots.
  struct Pair {
    int64_t row, slot;
  };
  // One distinct expert and its pairs.
  struct Group {
    const MlpWeights* mlp;
    int64_t first, count;
    uint64_t inputs;  // the name of its x in this phase
  };
  // Outputs [row_begin, row_end) of a part's matrix, for pairs [first, first + count) of a group.
  struct Task {
    const MlpWeights* mlp;
    int64_t part;
    int64_t row_begin, row_end, first, count;
    uint64_t inputs;
  };

  void group_pairs(const ExpertsCall& call);
  void name_inputs();
  uint64_t inputs_of_down(const Group& group, int64_t part) const;
  int64_t split(const ExpertsCall& call, bool down);
  int64_t open_gate_up(const ExpertsCall& call);
  int64_t open_down(const ExpertsCall& call);
  int64_t open_sum(const ExpertsCall& call);
  void activate(const ModelDims& dims, const MlpWeights& mlp, int64_t begin, int64_t end,
                float* gate, float* up);
  float* output(const ExpertsCall& call, int64_t part, int64_t slot);
  float* partial(const ExpertsCall& call, int64_t part, int64_t row);
  const MlpWeights& mlp_of(const ExpertsCall& call, int64_t row, int64_t k) const;
  int64_t num_takers() const;
  const Task* task_after(int64_t index) const;
  void run_gate_up(const ExpertsCall& call, int64_t index, int worker);
  void run_down(const ExpertsCall& call, const Task& task, int worker, const MatrixView* next,
                int64_t next_row);
  void run_down_and_sum(const ExpertsCall& call, int64_t task, int worker);
  void run_sum(const ExpertsCall& call, int64_t row);
  void sum_slots(const ExpertsCall& call, int64_t part, int64_t row, int64_t begin, int64_t end);
  void product(const ExpertsCall& call, const MatrixView& w, const Task& task,
               const float* const* x, float* const* y, int worker, const MatrixView* next,
               int64_t next_row);

  const InstructionSet& isa_;
  ThreadPool& pool_;
  std::vector<int32_t> group_of_;  // by expert; -1 between calls
  std::vector<Group> groups_;
  std::vector<Pair> pairs_;        // group by group
  std::vector<Task> tasks_;
  std::vector<float> gate_, up_;   // [slots][intermediate]
  std::vector<float> out_;         // [parts][slots][hidden]
  std::vector<float> partial_;     // [parts][rows][hidden], with more than one part
  std::vector<int64_t> node_begin_;  // of the tasks, when parts and nodes are as many; else empty
  int64_t num_parts_ = 1;
  int64_t slots_per_row_ = 0, inner_ = 0;
  int64_t joined_block_ = 0;       // hidden elements a task of down and sum; 0: phases of their own
};

}  // namespace moechat
