#include "prefill/prefill.h"

#include <algorithm>
#include <cstring>

#include "kernels/rope/rope.h"
#include "kernels/router/router.h"

namespace moechat {
namespace {

constexpr int64_t kTile = 128;                    // weight rows of one GEMM task
constexpr int64_t kRowsPerTask = 256;             // activation rows that share a decoded tile
constexpr int64_t kRowChunk = 16;                 // activation rows of one element-wise task
constexpr int64_t kExpertFloats = 128ll << 18;    // 128 MiB of expert outputs at a time

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace

Prefill::Prefill(const Model& model, ThreadPool& pool, const KVCache& cache,
                 std::vector<int32_t> tokens, int64_t prefix)
    : model_(model), isa_(active_instruction_set()), pool_(pool), cache_(cache),
      tokens_(std::move(tokens)), prefix_(prefix), experts_(isa_, pool),
      attention_(model, isa_, pool, num_tokens(), num_keys()) {
  const ModelDims& d = model.dims;
  const auto rows = static_cast<size_t>(num_tokens());
  x_.resize(rows * static_cast<size_t>(d.hidden));
  normed_.resize(rows * static_cast<size_t>(d.hidden));
  branch_.resize(rows * static_cast<size_t>(d.hidden));
  q_latent_.resize(rows * static_cast<size_t>(d.q_lora_rank));
  latents_.resize(static_cast<size_t>(num_keys() * d.kv_width()));
  values_.resize(rows * static_cast<size_t>(d.num_heads * d.v_dim));
  cos_sin_.resize(rows * static_cast<size_t>(d.rope_dim));
  router_logits_.resize(rows * static_cast<size_t>(d.num_experts));
  router_weights_.resize(rows * static_cast<size_t>(d.experts_per_token));
  kv_encoded_.resize(rows * static_cast<size_t>(cache.slot_bytes()));
  for (int64_t r = 0; r < num_tokens(); ++r) {
    decode_row(model.embedding, tokens_[static_cast<size_t>(r)], x_.data() + r * d.hidden);
    rope_angles(prefix + r, model.rope_inverse_frequencies.data(), d.rope_dim / 2,
                d.rope_amplitude, cos_sin_.data() + r * d.rope_dim);
  }
}

void Prefill::add_rows(Job& job, std::function<void(int64_t row)> body) {
  job.phases.push_back({[this] { return blocks(num_tokens(), kRowChunk); },
                        [this, body = std::move(body)](int64_t task, int) {
                          const int64_t end = std::min((task + 1) * kRowChunk, num_tokens());
                          for (int64_t r = task * kRowChunk; r < end; ++r) body(r);
                        }});
}

void Prefill::add_product(Job& job, const MatrixView& w, Compute compute, int64_t rows,
                          const float* x, float* y, int64_t y_stride) {
  const int64_t tiles = blocks(w.rows, kTile);
  job.phases.push_back(
      {[=] { return tiles * blocks(rows, kRowsPerTask); },
       [=, self = this, &w](int64_t task, int worker) {
         const int64_t begin = task % tiles * kTile, row = task / tiles * kRowsPerTask;
         const int64_t count = std::min(kRowsPerTask, rows - row);
         const float* inputs[kRowsPerTask];
         float* outputs[kRowsPerTask];
         for (int64_t i = 0; i < count; ++i) {
           inputs[i] = x + (row + i) * w.cols;
           outputs[i] = y + (row + i) * y_stride;
         }
         self->isa_.matmul->gemm(w, begin, std::min(begin + kTile, w.rows), compute, inputs, count,
                                 outputs, self->pool_.scratch(worker));
       }});
}

bool Prefill::run_layer(const CancelFlag* cancel, float* window_mass, int64_t window) {
  const LayerWeights& weights = model_.layers[static_cast<size_t>(layer_)];
  Job job;
  job.cancel = cancel;
  add_attention(job, weights, window_mass, window);
  add_feed_forward(job, weights);
  spent_ = true;  // unless all goes well
  if (!pool_.run(Priority::kPrefill, job)) return false;
  if (!all_finite(x_.data(), static_cast<int64_t>(x_.size()))) throw_non_finite(layer_);
  spent_ = false;
  ++layer_;
  return true;
}

void Prefill::add_attention(Job& job, const LayerWeights& weights, float* window_mass,
                            int64_t window) {
  const ModelDims& d = model_.dims;
  const AttentionWeights& attention = weights.attention;
  add_rows(job, [this, &weights, &d](int64_t r) {
    isa_.vector->rms_norm(x_.data() + r * d.hidden, weights.attention_norm.data(), d.rms_eps,
                          d.hidden, normed_.data() + r * d.hidden);
  });
  float* own_latents = latents_.data() + prefix_ * d.kv_width();
  add_product(job, attention.kv_a, model_.compute, num_tokens(), normed_.data(), own_latents,
              d.kv_width());
  if (d.q_lora_rank > 0)
    add_product(job, attention.q_a, model_.compute, num_tokens(), normed_.data(), q_latent_.data(),
                d.q_lora_rank);
  job.phases.push_back({[this]() -> int64_t {
                          read_prefix();
                          return 0;
                        },
                        {}});
  add_rows(job, [this, &attention, &d](int64_t r) {
    store_latent(attention, r);
    if (d.q_lora_rank > 0) {
      float* row = q_latent_.data() + r * d.q_lora_rank;
      isa_.vector->rms_norm(row, attention.q_a_norm.data(), d.latent_eps, d.q_lora_rank, row);
    }
  });
  const bool latent = d.q_lora_rank > 0;
  attention_.add_phases(job, attention, latents_.data(), latent ? q_latent_.data() : normed_.data(),
                        latent ? d.q_lora_rank : d.hidden, cos_sin_.data(), values_.data(),
                        window_mass, window);
  add_product(job, attention.o, model_.compute, num_tokens(), values_.data(), branch_.data(),
              d.hidden);
}

void Prefill::read_prefix() {
  for (int64_t slot = 0; slot < prefix_; ++slot)
    decode_slot(cache_.encoding(), cache_.slot(layer_, slot), cache_.width(),
                latents_.data() + slot * cache_.width());
}

// Norm and RoPE of one new slot; then its encoded form, and back, so that prefill attends to
// exactly what the cache will hold.
void Prefill::store_latent(const AttentionWeights& weights, int64_t row) {
  const ModelDims& d = model_.dims;
  float* latent = latents_.data() + (prefix_ + row) * d.kv_width();
  isa_.vector->rms_norm(latent, weights.kv_a_norm.data(), d.latent_eps, d.kv_lora_rank, latent);
  rope_interleaved(cos_sin_.data() + row * d.rope_dim, d.rope_dim / 2, latent + d.kv_lora_rank);
  uint8_t* encoded = kv_encoded_.data() + row * cache_.slot_bytes();
  encode_slot(cache_.encoding(), latent, d.kv_width(), encoded);
  decode_slot(cache_.encoding(), encoded, d.kv_width(), latent);
}

void Prefill::add_feed_forward(Job& job, const LayerWeights& weights) {
  const ModelDims& d = model_.dims;
  add_rows(job, [this, &weights, &d](int64_t r) {
    isa_.vector->axpy(1.0f, branch_.data() + r * d.hidden, d.hidden, x_.data() + r * d.hidden);
    isa_.vector->rms_norm(x_.data() + r * d.hidden, weights.ffn_norm.data(), d.rms_eps, d.hidden,
                          normed_.data() + r * d.hidden);
  });
  router_ids_.resize(weights.is_moe ? static_cast<size_t>(num_tokens() * d.experts_per_token) : 0);
  if (weights.is_moe) {
    add_product(job, weights.router, Compute::kExact, num_tokens(), normed_.data(),
                router_logits_.data(), d.num_experts);
    add_rows(job, [this, &weights](int64_t r) { route(weights, r); });
  }
  const int64_t per_row = (d.experts_per_token + 1) * d.hidden;
  const int64_t chunk = std::max<int64_t>(kMaxGemvRows, kExpertFloats / per_row);
  calls_.assign(static_cast<size_t>(blocks(num_tokens(), chunk)), {});
  for (int64_t row = 0; row < num_tokens(); row += chunk) {
    ExpertsCall& call = calls_[static_cast<size_t>(row / chunk)];
    call.layer = &weights;
    call.compute = model_.compute;
    call.num_rows = std::min(chunk, num_tokens() - row);
    call.hidden = d.hidden;
    call.experts_per_token = d.experts_per_token;
    call.x = normed_.data() + row * d.hidden;
    call.ids = router_ids_.data() + row * d.experts_per_token;
    call.weights = router_weights_.data() + row * d.experts_per_token;
    call.y = x_.data() + row * d.hidden;
    call.accumulate = true;
    experts_.add_phases(job, &call);
  }
}

void Prefill::route(const LayerWeights& weights, int64_t row) {
  const ModelDims& d = model_.dims;
  float* logits = router_logits_.data() + row * d.num_experts;
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(2 * d.num_experts + d.num_groups));
  route_sigmoid(d.router_rule(), logits, weights.router_bias.data(), scratch.data(),
                router_ids_.data() + row * d.experts_per_token,
                router_weights_.data() + row * d.experts_per_token);
}

bool Prefill::logits(const CancelFlag* cancel, int64_t first, float* out) {
  const ModelDims& d = model_.dims;
  const int64_t rows = num_tokens() - first;
  Job job;
  job.cancel = cancel;
  add_rows(job, [this, &d](int64_t r) {
    isa_.vector->rms_norm(x_.data() + r * d.hidden, model_.final_norm.data(), d.rms_eps, d.hidden,
                          normed_.data() + r * d.hidden);
  });
  add_product(job, model_.head, model_.compute, rows, normed_.data() + first * d.hidden, out,
              d.vocab);
  if (!pool_.run(Priority::kPrefill, job)) return false;
  if (!all_finite(out, rows * d.vocab)) throw_non_finite(-1);
  return true;
}

}  // namespace moechat
