// Grouped-query attention for prefill: keys and values are read where the slots stand.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/threads.h"
#include "kernels/attention/prefill_call.h"
#include "model/model.h"

namespace moechat {

class GroupedPrefill {
 public:
  // `most_keys`: of the layer that has the most.
  GroupedPrefill(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                 int64_t num_tokens, int64_t most_keys);

  // Appends the phases for one layer; query [T][num_heads * head_dim], rotated.
  void add_phases(Job& job, const PrefillAttentionCall& call, const float* query);

 private:
  MatrixView head_rows(const PrefillAttentionCall& call, int64_t head, bool value) const;
  QueryBlock queries(const PrefillAttentionCall& call, const float* query, int64_t head,
                     int64_t begin, int64_t count) const;

  const Model& model_;
  const InstructionSet& isa_;
  ThreadPool& pool_;
  int64_t num_tokens_, query_block_;
  std::vector<std::vector<float>> worker_floats_;
};

}  // namespace moechat
