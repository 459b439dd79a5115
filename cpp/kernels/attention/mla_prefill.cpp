#include "kernels/attention/mla_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/rope/rope.h"

namespace moechat {
namespace {

constexpr int64_t kMaxQueries = 128;            // queries of one attention task, at most
constexpr int64_t kTaskFlops = 80'000'000;      // and about this much work
constexpr int64_t kKeyBlock = 128;              // keys between two updates of the running softmax
constexpr int64_t kGroupBytes = 64ll << 20;     // expanded keys and values held at a time
constexpr float kMasked = -std::numeric_limits<float>::infinity();

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace

PrefillAttention::PrefillAttention(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                                   int64_t num_tokens, int64_t num_keys)
    : model_(model), isa_(isa), pool_(pool), num_tokens_(num_tokens), num_keys_(num_keys) {
  const ModelDims& d = model.dims;
  const int64_t head_bytes = num_keys * (d.qk_dim() + d.v_dim) * 4;
  group_heads_ = std::clamp<int64_t>(kGroupBytes / head_bytes, 1, d.num_heads);
  // By the shape alone. Many queries share one packing of the keys; few keep a task short.
  const int64_t query_flops = 2 * num_keys * (d.qk_dim() + d.v_dim);
  query_block_ = std::clamp<int64_t>(kTaskFlops / query_flops / 16 * 16, 16, kMaxQueries);
  const auto heads = static_cast<size_t>(group_heads_);
  query_.resize(heads * static_cast<size_t>(num_tokens * d.qk_dim()));
  key_.resize(heads * static_cast<size_t>(num_keys * d.qk_dim()));
  value_.resize(heads * static_cast<size_t>(num_keys * d.v_dim));
  const int64_t attend_floats = kMaxQueries * (kKeyBlock + 2 * d.v_dim);
  const int64_t expand_floats = kKeyBlock * (d.nope_dim + d.v_dim);
  const int64_t window_floats = kMaxGemvRows * num_keys;
  worker_floats_.resize(static_cast<size_t>(pool.num_threads()));
  for (auto& floats : worker_floats_)
    floats.resize(static_cast<size_t>(std::max({attend_floats, expand_floats, window_floats})));
}

MatrixView PrefillAttention::float_view(const std::vector<float>& buffer, int64_t slot,
                                        int64_t cols) const {
  MatrixView view;
  view.format = Format::kF32;
  view.rows = num_keys_;
  view.cols = cols;
  view.row_stride_bytes = 4 * cols;
  view.data = reinterpret_cast<const uint8_t*>(buffer.data() + slot * num_keys_ * cols);
  return view;
}

MatrixView PrefillAttention::keys(int64_t slot) const {
  return float_view(key_, slot, model_.dims.qk_dim());
}

MatrixView PrefillAttention::values(int64_t slot) const {
  return float_view(value_, slot, model_.dims.v_dim);
}

void PrefillAttention::add_phases(Job& job, const AttentionWeights& weights, const float* latents,
                                  const float* q_input, int64_t q_width, const float* cos_sin,
                                  float* values, float* window_mass, int64_t window) {
  const ModelDims& d = model_.dims;
  window = std::min(window, num_tokens_);
  if (window_mass != nullptr)
    head_mass_.assign(static_cast<size_t>(d.num_heads * num_keys_), 0.0f);
  const int64_t query_blocks = blocks(num_tokens_, query_block_);
  const int64_t key_blocks = blocks(num_keys_, kKeyBlock);
  for (int64_t first = 0; first < d.num_heads; first += group_heads_) {
    const int64_t heads = std::min(group_heads_, d.num_heads - first);
    const int64_t query_tasks = heads * blocks(num_tokens_, kKeyBlock);
    job.phases.push_back(
        {[=] { return query_tasks + heads * key_blocks; },
         [=, self = this, &weights](int64_t task, int worker) {
           if (task < query_tasks)
             self->project_queries(weights, first + task % heads, task % heads, task / heads,
                                    q_input, q_width, cos_sin, worker);
           else
             self->expand_keys(weights, first + (task - query_tasks) / key_blocks,
                                (task - query_tasks) / key_blocks,
                                (task - query_tasks) % key_blocks, latents, worker);
         }});
    // Head by head, so that its keys and values stay in cache; late query blocks, which see the most
    // keys, go first.
    job.phases.push_back({[=] { return heads * query_blocks; },
                          [=, self = this](int64_t task, int worker) {
                            const int64_t slot = task / query_blocks;
                            self->attend(first + slot, slot, query_blocks - 1 - task % query_blocks,
                                         values, worker);
                          }});
    if (window_mass != nullptr)
      job.phases.push_back({[=] { return heads; },
                            [=, self = this](int64_t slot, int worker) {
                              self->sum_window(first + slot, slot, window, worker);
                            }});
  }
  if (window_mass == nullptr) return;
  job.phases.push_back({[=, self = this]() -> int64_t {
                          const int64_t n = self->num_keys_, heads = self->model_.dims.num_heads;
                          std::fill(window_mass, window_mass + n, 0.0f);
                          for (int64_t h = 0; h < heads; ++h)
                            self->isa_.vector->axpy(1.0f / static_cast<float>(heads),
                                                     self->head_mass_.data() + h * n, n,
                                                     window_mass);
                          return 0;
                        },
                        {}});
}

// Queries of one head for kKeyBlock tokens: projection, then RoPE.
void PrefillAttention::project_queries(const AttentionWeights& weights, int64_t head, int64_t slot,
                                       int64_t block, const float* q_input, int64_t q_width,
                                       const float* cos_sin, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t begin = block * kKeyBlock, count = std::min(kKeyBlock, num_tokens_ - begin);
  const float* x[kKeyBlock];
  float* y[kKeyBlock];
  for (int64_t i = 0; i < count; ++i) {
    x[i] = q_input + (begin + i) * q_width;
    y[i] = query_.data() + (slot * num_tokens_ + begin + i) * d.qk_dim();
  }
  isa_.matmul->gemm(weights.q_b.row_slice(head * d.qk_dim(), d.qk_dim()), 0, d.qk_dim(),
                    model_.compute, x, count, y, pool_.scratch(worker));
  for (int64_t i = 0; i < count; ++i)
    rope_interleaved(cos_sin + (begin + i) * d.rope_dim, d.rope_dim / 2, y[i] + d.nope_dim);
}

// Keys and values of one head for one block of slots, as the cache's latents give them.
void PrefillAttention::expand_keys(const AttentionWeights& weights, int64_t head, int64_t slot,
                                   int64_t block, const float* latents, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t begin = block * kKeyBlock, count = std::min(kKeyBlock, num_keys_ - begin);
  const int64_t width = d.nope_dim + d.v_dim;
  float* expanded = worker_floats_[static_cast<size_t>(worker)].data();  // [kKeyBlock][width]
  const float* x[kKeyBlock];
  float* y[kKeyBlock];
  for (int64_t i = 0; i < count; ++i) {
    x[i] = latents + (begin + i) * d.kv_width();
    y[i] = expanded + i * width;
  }
  isa_.matmul->gemm(weights.kv_b.row_slice(head * width, width), 0, width, Compute::kExact, x, count,
                    y, pool_.scratch(worker));
  for (int64_t i = 0; i < count; ++i) {
    float* key = key_.data() + (slot * num_keys_ + begin + i) * d.qk_dim();
    std::copy(y[i], y[i] + d.nope_dim, key);
    std::copy_n(x[i] + d.kv_lora_rank, d.rope_dim, key + d.nope_dim);
    std::copy_n(y[i] + d.nope_dim, d.v_dim,
                value_.data() + (slot * num_keys_ + begin + i) * d.v_dim);
  }
}

void PrefillAttention::attend(int64_t head, int64_t slot, int64_t block, float* values,
                              int worker) {
  const ModelDims& d = model_.dims;
  const int64_t begin = block * query_block_, count = std::min(query_block_, num_tokens_ - begin);
  const int64_t prefix = num_keys_ - num_tokens_;
  float* scores = worker_floats_[static_cast<size_t>(worker)].data();  // [kMaxQueries][kKeyBlock]
  float* block_out = scores + kMaxQueries * kKeyBlock;                 // [kMaxQueries][v_dim]
  float* out = block_out + kMaxQueries * d.v_dim;                      // [kMaxQueries][v_dim]
  float max[kMaxQueries], sum[kMaxQueries];
  const float* queries[kMaxQueries];
  const float* probabilities[kMaxQueries];
  float* score_rows[kMaxQueries];
  float* block_rows[kMaxQueries];
  for (int64_t i = 0; i < count; ++i) {
    queries[i] = query_.data() + (slot * num_tokens_ + begin + i) * d.qk_dim();
    score_rows[i] = scores + i * kKeyBlock;
    probabilities[i] = score_rows[i];
    block_rows[i] = block_out + i * d.v_dim;
    max[i] = kMasked;
    sum[i] = 0;
  }
  std::memset(out, 0, static_cast<size_t>(count * d.v_dim) * sizeof(float));
  const int64_t last_key = prefix + begin + count;  // exclusive: the last query sees itself
  for (int64_t key = 0; key < last_key; key += kKeyBlock) {
    const int64_t width = std::min(kKeyBlock, last_key - key);
    isa_.matmul->gemm(keys(slot).row_slice(key, width), 0, width, Compute::kExact, queries, count,
                      score_rows, pool_.scratch(worker));
    for (int64_t i = 0; i < count; ++i) {
      float* row = score_rows[i];
      const int64_t visible = std::clamp<int64_t>(prefix + begin + i + 1 - key, 0, width);
      isa_.vector->scale(row, d.softmax_scale, visible);
      std::fill(row + visible, row + width, 0.0f);
      if (visible == 0) continue;
      const float best = std::max(max[i], isa_.vector->max(row, visible));
      const float rescale = std::exp(max[i] - best);
      sum[i] = sum[i] * rescale + isa_.vector->exp_sum(row, best, visible);
      isa_.vector->scale(out + i * d.v_dim, rescale, d.v_dim);
      max[i] = best;
    }
    isa_.matmul->gemv_transposed(this->values(slot).row_slice(key, width), 0, d.v_dim,
                                 Compute::kExact, probabilities, count, block_rows,
                                 pool_.scratch(worker));
    isa_.vector->axpy(1.0f, block_out, count * d.v_dim, out);
  }
  for (int64_t i = 0; i < count; ++i) {
    float* y = values + (begin + i) * d.num_heads * d.v_dim + head * d.v_dim;
    std::memcpy(y, out + i * d.v_dim, static_cast<size_t>(d.v_dim) * sizeof(float));
    isa_.vector->scale(y, 1.0f / sum[i], d.v_dim);
  }
}

// Attention of the last queries, once more, with their whole score rows in hand.
void PrefillAttention::sum_window(int64_t head, int64_t slot, int64_t window, int worker) {
  const ModelDims& d = model_.dims;
  float* scores = worker_floats_[static_cast<size_t>(worker)].data();  // [kMaxGemvRows][n]
  float* mass = head_mass_.data() + head * num_keys_;
  for (int64_t begin = num_tokens_ - window; begin < num_tokens_; begin += kMaxGemvRows) {
    const int64_t count = std::min<int64_t>(kMaxGemvRows, num_tokens_ - begin);
    const float* queries[kMaxGemvRows];
    float* rows[kMaxGemvRows];
    for (int64_t i = 0; i < count; ++i) {
      queries[i] = query_.data() + (slot * num_tokens_ + begin + i) * d.qk_dim();
      rows[i] = scores + i * num_keys_;
    }
    isa_.matmul->gemv(keys(slot), 0, num_keys_, Compute::kExact, queries, static_cast<int>(count),
                      rows, pool_.scratch(worker));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t visible = num_keys_ - num_tokens_ + begin + i + 1;
      isa_.vector->scale(rows[i], d.softmax_scale, visible);
      const float sum = isa_.vector->exp_sum(rows[i], isa_.vector->max(rows[i], visible), visible);
      isa_.vector->axpy(1.0f / sum, rows[i], visible, mass);
    }
  }
}

}  // namespace moechat
