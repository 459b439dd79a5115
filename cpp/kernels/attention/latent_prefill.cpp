#include "kernels/attention/latent_prefill.h"

#include <algorithm>

#include "kernels/matmul/product.h"
#include "kernels/rope/rope.h"

namespace moechat {
namespace {

constexpr int64_t kGroupBytes = 64ll << 20;  // expanded keys and values held at a time

}  // namespace

LatentPrefill::LatentPrefill(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                             int64_t num_tokens, int64_t most_keys)
    : model_(model), isa_(isa), pool_(pool), num_tokens_(num_tokens) {
  const ModelDims& d = model.dims;
  const int64_t head_bytes = most_keys * (d.query_dim() + d.v_dim) * 4;
  group_heads_ = std::clamp<int64_t>(kGroupBytes / head_bytes, 1, d.num_heads);
  query_block_ = queries_per_block(most_keys, d.query_dim(), d.v_dim);
  const auto heads = static_cast<size_t>(group_heads_);
  query_.resize(heads * static_cast<size_t>(num_tokens * d.query_dim()));
  key_.resize(heads * static_cast<size_t>(most_keys * d.query_dim()));
  value_.resize(heads * static_cast<size_t>(most_keys * d.v_dim));
  worker_floats_.resize(static_cast<size_t>(pool.num_threads()));
  for (auto& floats : worker_floats_)
    floats.resize(static_cast<size_t>(
        std::max(attend_block_floats(d.v_dim), window_mass_floats(most_keys))));
}

void LatentPrefill::add_phases(Job& job, const PrefillAttentionCall& call, const float* q_input,
                               int64_t q_width) {
  const ModelDims& d = model_.dims;
  const int64_t query_blocks = ceil_div(num_tokens_, query_block_);
  const int64_t key_blocks = ceil_div(call.num_keys, kKeyBlock);
  for (int64_t first = 0; first < d.num_heads; first += group_heads_) {
    const int64_t heads = std::min(group_heads_, d.num_heads - first);
    const int64_t query_tasks = heads * ceil_div(num_tokens_, kKeyBlock);
    job.phases.push_back({[=] { return query_tasks + heads * key_blocks; },
                          [=, self = this, &call](int64_t task, int worker) {
                            if (task < query_tasks)
                              return self->project_queries(call, first + task % heads, task % heads,
                                                           task / heads, q_input, q_width, worker);
                            const int64_t key_task = task - query_tasks;
                            self->expand_keys(call, first + key_task / key_blocks,
                                              key_task / key_blocks, key_task % key_blocks, worker);
                          },
                          "attention.expand"});
    // Head by head, so that its keys and values stay in cache; late query blocks, which see the most
    // keys, go first.
    job.phases.push_back(
        {[=] { return heads * query_blocks; },
         [=, self = this, &call, &d](int64_t task, int worker) {
           const int64_t place = task / query_blocks, n = call.num_keys;
           const int64_t begin = (query_blocks - 1 - task % query_blocks) * self->query_block_;
           const int64_t count = std::min(self->query_block_, self->num_tokens_ - begin);
           const int64_t width = d.num_heads * d.v_dim;
           attend_block(self->isa_, d,
                        float_rows(self->key_.data() + place * n * d.query_dim(), n, d.query_dim(),
                                   d.query_dim()),
                        float_rows(self->value_.data() + place * n * d.v_dim, n, d.v_dim, d.v_dim),
                        self->queries(call, place, begin, count), call.sink(first + place),
                        call.values + begin * width + (first + place) * d.v_dim, width,
                        self->worker_floats_[static_cast<size_t>(worker)].data(),
                        self->pool_.scratch(worker));
         },
         "attention.blocks"});
    if (call.head_mass == nullptr) continue;
    job.phases.push_back(
        {[=] { return heads; },
         [=, self = this, &call, &d](int64_t place, int worker) {
           const int64_t n = call.num_keys, begin = self->num_tokens_ - call.mass_window;
           add_window_mass(self->isa_, d,
                           float_rows(self->key_.data() + place * n * d.query_dim(), n,
                                      d.query_dim(), d.query_dim()),
                           self->queries(call, place, begin, call.mass_window),
                           call.sink(first + place), call.head_mass + (first + place) * n,
                           self->worker_floats_[static_cast<size_t>(worker)].data(),
                           self->pool_.scratch(worker));
         },
         "attention.blocks"});
  }
}

QueryBlock LatentPrefill::queries(const PrefillAttentionCall& call, int64_t place, int64_t begin,
                                  int64_t count) const {
  const int64_t width = model_.dims.query_dim();
  return {query_.data() + (place * num_tokens_ + begin) * width, width, count,
          call.num_keys - num_tokens_ + begin,
          call.visible_begin != nullptr ? call.visible_begin + begin : nullptr};
}

// Queries of one head for kKeyBlock tokens: projection, then rotation.
void LatentPrefill::project_queries(const PrefillAttentionCall& call, int64_t head, int64_t place,
                                    int64_t block, const float* q_input, int64_t q_width,
                                    int worker) {
  const ModelDims& d = model_.dims;
  const int64_t begin = block * kKeyBlock, count = std::min(kKeyBlock, num_tokens_ - begin);
  const float* x[kKeyBlock];
  float* y[kKeyBlock];
  for (int64_t i = 0; i < count; ++i) {
    x[i] = q_input + (begin + i) * q_width;
    // multiply() writes at the head's own outputs.
    y[i] = query_.data() + (place * num_tokens_ + begin + i) * d.query_dim() -
           head * d.query_dim();
  }
  multiply(*isa_.matmul, call.layer->latent.q_b, head * d.query_dim(), (head + 1) * d.query_dim(),
           model_.compute, x, count, y, pool_.scratch(worker));
  const Rope& rope = model_.ropes[static_cast<size_t>(call.layer->rope)];
  for (int64_t i = 0; i < count; ++i)
    rope_rotate(call.cos_sin + (begin + i) * call.cos_sin_stride, rope.pairs(), rope.interleaved,
                y[i] + head * d.query_dim() + d.nope_dim);
}

// Keys and values of one head for one block of slots, as the cache's latents give them: they are BF16
// already in the mode that rounds inputs to it.
void LatentPrefill::expand_keys(const PrefillAttentionCall& call, int64_t head, int64_t place,
                                int64_t block, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t begin = block * kKeyBlock, count = std::min(kKeyBlock, call.num_keys - begin);
  const float* x[kKeyBlock];
  float* keys[kKeyBlock];
  float* values[kKeyBlock];
  for (int64_t i = 0; i < count; ++i) {
    x[i] = call.slots + (begin + i) * d.kv_width();
    keys[i] = key_.data() + (place * call.num_keys + begin + i) * d.query_dim();
    values[i] = value_.data() + (place * call.num_keys + begin + i) * d.v_dim;
    std::copy_n(x[i] + d.kv_lora_rank, d.rope_dim, keys[i] + d.nope_dim);
  }
  const LatentWeights& weights = call.layer->latent;
  multiply(*isa_.matmul, weights.key_expand[static_cast<size_t>(head)], 0, d.nope_dim,
           model_.compute, x, count, keys, pool_.scratch(worker));
  multiply(*isa_.matmul, weights.value_expand[static_cast<size_t>(head)], 0, d.v_dim,
           model_.compute, x, count, values, pool_.scratch(worker));
}

}  // namespace moechat
