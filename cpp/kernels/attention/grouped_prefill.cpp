#include "kernels/attention/grouped_prefill.h"

#include <algorithm>

namespace moechat {

GroupedPrefill::GroupedPrefill(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                               int64_t num_tokens, int64_t most_keys)
    : model_(model), isa_(isa), pool_(pool), num_tokens_(num_tokens) {
  const int64_t width = model.dims.head_dim;
  query_block_ = queries_per_block(most_keys, width, width);
  worker_floats_.resize(static_cast<size_t>(pool.num_threads()));
  for (auto& floats : worker_floats_)
    floats.resize(
        static_cast<size_t>(std::max(attend_block_floats(width), window_mass_floats(most_keys))));
}

// The keys, or values, that query head `head` attends to.
MatrixView GroupedPrefill::head_rows(const PrefillAttentionCall& call, int64_t head,
                                     bool value) const {
  const ModelDims& d = model_.dims;
  const int64_t kv_head = head / d.heads_per_group() + (value ? d.num_kv_heads : 0);
  return float_rows(call.slots + kv_head * d.head_dim, call.num_keys, d.head_dim, d.kv_width());
}

QueryBlock GroupedPrefill::queries(const PrefillAttentionCall& call, const float* query,
                                   int64_t head, int64_t begin, int64_t count) const {
  const ModelDims& d = model_.dims;
  const int64_t width = d.num_heads * d.head_dim;
  return {query + begin * width + head * d.head_dim, width, count,
          call.num_keys - num_tokens_ + begin,
          call.visible_begin != nullptr ? call.visible_begin + begin : nullptr};
}

void GroupedPrefill::add_phases(Job& job, const PrefillAttentionCall& call, const float* query) {
  const ModelDims& d = model_.dims;
  const int64_t query_blocks = ceil_div(num_tokens_, query_block_);
  // Head by head, so that its keys and values stay in cache; late query blocks, which see the most
  // keys, go first.
  job.phases.push_back(
      {[=] { return d.num_heads * query_blocks; },
       [=, self = this, &call, &d](int64_t task, int worker) {
         const int64_t head = task / query_blocks, width = d.num_heads * d.head_dim;
         const int64_t begin = (query_blocks - 1 - task % query_blocks) * self->query_block_;
         const int64_t count = std::min(self->query_block_, self->num_tokens_ - begin);
         attend_block(self->isa_, d, self->head_rows(call, head, false),
                      self->head_rows(call, head, true),
                      self->queries(call, query, head, begin, count), call.sink(head),
                      call.values + begin * width + head * d.head_dim, width,
                      self->worker_floats_[static_cast<size_t>(worker)].data(),
                      self->pool_.scratch(worker));
       },
       "attention.blocks"});
  if (call.head_mass == nullptr) return;
  job.phases.push_back(
      {[=] { return d.num_heads; },
       [=, self = this, &call, &d](int64_t head, int worker) {
         const int64_t begin = self->num_tokens_ - call.mass_window;
         add_window_mass(self->isa_, d, self->head_rows(call, head, false),
                         self->queries(call, query, head, begin, call.mass_window),
                         call.sink(head), call.head_mass + head * call.num_keys,
                         self->worker_floats_[static_cast<size_t>(worker)].data(),
                         self->pool_.scratch(worker));
       },
       "attention.blocks"});
}

}  // namespace moechat
