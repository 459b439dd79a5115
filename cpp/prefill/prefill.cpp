#include "prefill/prefill.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/rows.h"
#include "kernels/matmul/blocks.h"
#include "kernels/matmul/product.h"
#include "kernels/router/router.h"

namespace moechat {
namespace {

constexpr int64_t kRowsPerTask = 256;             // activation rows that share a decoded tile
constexpr int64_t kRowChunk = 16;                 // activation rows of one element-wise task
constexpr int64_t kExpertFloats = 128ll << 18;    // 128 MiB of expert activations at a time

void resize(std::vector<float>& buffer, int64_t size) { buffer.resize(static_cast<size_t>(size)); }

std::vector<int64_t> slots_held(const KVCache& cache) {
  std::vector<int64_t> slots;
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer)
    slots.push_back(cache.num_slots(layer));
  return slots;
}

}  // namespace

Prefill::Prefill(const Model& model, ThreadPool& pool, const KVCache& cache,
                 std::vector<int32_t> tokens, int64_t first_position)
    : model_(model), isa_(active_instruction_set()), pool_(pool), cache_(cache),
      tokens_(std::move(tokens)), prefixes_(slots_held(cache)), first_position_(first_position),
      angles_(static_cast<int64_t>(model.ropes.size()) * 2 * model.rope_pairs()),
      experts_(isa_, pool) {
  const ModelDims& d = model.dims;
  const int64_t rows = num_tokens();
  const int64_t most_keys = rows + *std::max_element(prefixes_.begin(), prefixes_.end());
  if (d.latent())
    latent_.emplace(model, isa_, pool, rows, most_keys);
  else
    grouped_.emplace(model, isa_, pool, rows, most_keys);
  resize(x_, rows * d.hidden);
  resize(normed_, rows * d.hidden);
  resize(branch_, rows * d.hidden);
  resize(query_, rows * (d.latent() ? d.q_lora_rank : d.num_heads * d.head_dim));
  resize(slots_, most_keys * d.kv_width());
  resize(values_, rows * d.num_heads * d.value_dim());
  resize(cos_sin_, rows * angles_);
  resize(router_logits_, rows * d.num_experts);
  resize(router_weights_, rows * d.experts_per_token);
  resize(shared_weights_, rows);
  visible_begin_.resize(static_cast<size_t>(rows));
  kv_encoded_.resize(static_cast<size_t>(rows * cache.slot_bytes()));
}

void Prefill::add_embedding(Job& job) {
  add_rows(job, "embedding", [this](int64_t r) {
    if (!model_.is_draft())
      embed(model_, tokens_[static_cast<size_t>(r)], x_.data() + r * model_.dims.hidden);
    model_angles(model_, first_position_ + r, cos_sin_.data() + r * angles_);
  });
}

void Prefill::add_rows(Job& job, const char* name, std::function<void(int64_t row)> body) {
  job.phases.push_back({[this] { return ceil_div(num_tokens(), kRowChunk); },
                        [this, body = std::move(body)](int64_t task, int) {
                          const int64_t end = std::min((task + 1) * kRowChunk, num_tokens());
                          for (int64_t r = task * kRowChunk; r < end; ++r) body(r);
                        },
                        name});
}

void Prefill::add_product(Job& job, const char* name, const MatrixView& w, Compute compute,
                          int64_t rows, const float* x, float* y, int64_t y_stride) {
  const int64_t row_tasks = ceil_div(rows, kRowsPerTask);
  const int64_t block = outputs_per_prefill_block(w, std::min(rows, kRowsPerTask), row_tasks);
  const int64_t tiles = ceil_div(w.outputs(), block);
  job.phases.push_back(
      {[=] { return tiles * row_tasks; },
       [=, self = this, &w](int64_t task, int worker) {
         const int64_t begin = task % tiles * block, row = task / tiles * kRowsPerTask;
         const int64_t count = std::min(kRowsPerTask, rows - row);
         const float* inputs[kRowsPerTask];
         float* outputs[kRowsPerTask];
         for (int64_t i = 0; i < count; ++i) {
           inputs[i] = x + (row + i) * w.inputs();
           outputs[i] = y + (row + i) * y_stride;
         }
         multiply(*self->isa_.matmul, w, begin, std::min(begin + block, w.outputs()), compute,
                  inputs, count, outputs, self->pool_.scratch(worker));
       },
       name});
}

bool Prefill::run_layer(const CancelFlag* cancel, float* window_mass, int64_t window) {
  const LayerWeights& weights = model_.layers[static_cast<size_t>(layer_)];
  Job job;
  job.cancel = cancel;
  if (layer_ == 0) add_embedding(job);
  add_attention(job, weights, window_mass, window);
  add_feed_forward(job, weights);
  spent_ = true;  // unless all goes well
  if (!pool_.run(Priority::kPrefill, job)) return false;
  if (!all_finite(x_.data(), static_cast<int64_t>(x_.size()))) throw_non_finite(layer_);
  spent_ = false;
  ++layer_;
  return true;
}

// The attention branch joins the residual stream; the input of the MLP or the experts.
void Prefill::join_attention(const LayerWeights& weights, int64_t row) {
  const ModelDims& d = model_.dims;
  float* branch = branch_.data() + row * d.hidden;
  float* x = x_.data() + row * d.hidden;
  add_bias(isa_, weights.o_bias, branch);
  if (!weights.post_attention_norm.empty())
    isa_.vector->rms_norm(branch, weights.post_attention_norm.data(), d.rms_eps, d.hidden, branch);
  isa_.vector->axpy(1.0f, branch, d.hidden, x);
  isa_.vector->rms_norm(x, weights.ffn_norm.data(), d.rms_eps, d.hidden,
                        normed_.data() + row * d.hidden);
}

void Prefill::add_feed_forward(Job& job, const LayerWeights& weights) {
  const ModelDims& d = model_.dims;
  add_rows(job, "attention.output", [this, &weights](int64_t r) { join_attention(weights, r); });
  router_ids_.resize(weights.is_moe ? static_cast<size_t>(num_tokens() * d.experts_per_token) : 0);
  if (weights.is_moe) {
    add_product(job, "router", weights.router, Compute::kExact, num_tokens(), normed_.data(),
                router_logits_.data(), d.num_experts);
    if (weights.shared_gate.data != nullptr)
      add_product(job, "router", weights.shared_gate, Compute::kExact, num_tokens(), normed_.data(),
                  shared_weights_.data(), 1);
    add_rows(job, "router", [this, &weights](int64_t r) { route_row(weights, r); });
  }
  add_experts(job, weights);
  if (weights.post_ffn_norm.empty()) return;
  add_rows(job, "norm", [this, &weights, &d](int64_t r) {
    float* branch = branch_.data() + r * d.hidden;
    isa_.vector->rms_norm(branch, weights.post_ffn_norm.data(), d.rms_eps, d.hidden, branch);
    isa_.vector->axpy(1.0f, branch, d.hidden, x_.data() + r * d.hidden);
  });
}

void Prefill::add_experts(Job& job, const LayerWeights& weights) {
  const ModelDims& d = model_.dims;
  const bool post_norm = !weights.post_ffn_norm.empty();
  const int64_t slots = weights.is_moe ? d.experts_per_token + weights.has_shared : 1;
  const MlpWeights& widest = !weights.is_moe     ? weights.dense
                             : weights.has_shared ? weights.shared
                                                  : weights.experts[0];
  const int64_t per_row = slots * (weights.num_parts * d.hidden + 2 * widest.gate.outputs());
  const int64_t chunk = std::max<int64_t>(kMaxGemvRows, kExpertFloats / per_row);
  calls_.assign(static_cast<size_t>(ceil_div(num_tokens(), chunk)), {});
  for (int64_t row = 0; row < num_tokens(); row += chunk) {
    ExpertsCall& call = calls_[static_cast<size_t>(row / chunk)];
    call.dims = &d;
    call.layer = &weights;
    call.compute = model_.compute;
    call.num_rows = std::min(chunk, num_tokens() - row);
    call.experts_per_token = d.experts_per_token;
    call.x = normed_.data() + row * d.hidden;
    call.ids = router_ids_.data() + row * d.experts_per_token;
    call.weights = router_weights_.data() + row * d.experts_per_token;
    if (weights.shared_gate.data != nullptr) call.shared_weights = shared_weights_.data() + row;
    call.y = (post_norm ? branch_ : x_).data() + row * d.hidden;
    call.accumulate = !post_norm;
    experts_.add_phases(job, &call);
  }
}

void Prefill::route_row(const LayerWeights& weights, int64_t row) {
  const ModelDims& d = model_.dims;
  float* logits = router_logits_.data() + row * d.num_experts;
  thread_local std::vector<float> scratch;
  resize(scratch, 2 * d.num_experts + d.num_groups);
  add_bias(isa_, weights.router_bias, logits);
  route(d.router_rule(), logits,
        weights.router_correction.empty() ? nullptr : weights.router_correction.data(),
        scratch.data(), router_ids_.data() + row * d.experts_per_token,
        router_weights_.data() + row * d.experts_per_token);
  if (weights.shared_gate.data == nullptr) return;
  float& gate = shared_weights_[static_cast<size_t>(row)];
  gate = 1.0f / (1.0f + std::exp(-gate));
}

bool Prefill::logits(const CancelFlag* cancel, int64_t first, float* out) {
  const ModelDims& d = model_.dims;
  const int64_t rows = num_tokens() - first;
  Job job;
  job.cancel = cancel;
  add_rows(job, "head", [this, &d](int64_t r) {
    isa_.vector->rms_norm(x_.data() + r * d.hidden, model_.final_norm.data(), d.rms_eps, d.hidden,
                          normed_.data() + r * d.hidden);
  });
  add_product(job, "head", model_.head, model_.compute, rows, normed_.data() + first * d.hidden,
              out, d.vocab);
  if (d.final_softcap > 0)
    add_rows(job, "head", [this, &d, first, out](int64_t r) {
      if (r >= first) isa_.vector->softcap(out + (r - first) * d.vocab, d.final_softcap, d.vocab);
    });
  if (!pool_.run(Priority::kPrefill, job)) return false;
  if (!all_finite(out, rows * d.vocab)) throw_non_finite(-1);
  return true;
}

}  // namespace moechat
