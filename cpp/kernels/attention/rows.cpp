#include "kernels/attention/rows.h"

#include <algorithm>

#include "kernels/rope/rope.h"

namespace moechat {
namespace {

// `weight` is as long as a head, as long as the row, or empty.
void norm_heads(const InstructionSet& isa, const std::vector<float>& weight, float eps,
                int64_t width, float* x) {
  const auto span = static_cast<int64_t>(weight.size());
  if (span == 0) return;
  for (int64_t i = 0; i < width; i += span)
    isa.vector->rms_norm(x + i, weight.data(), eps, span, x + i);
}

void clip(float limit, int64_t n, float* x) {
  if (limit <= 0) return;
  for (int64_t i = 0; i < n; ++i) x[i] = std::clamp(x[i], -limit, limit);
}

}  // namespace

void add_bias(const InstructionSet& isa, const std::vector<float>& bias, float* x) {
  if (!bias.empty()) isa.vector->axpy(1.0f, bias.data(), static_cast<int64_t>(bias.size()), x);
}

void finish_latent_slot(const InstructionSet& isa, const ModelDims& d, const Rope& rope,
                        const LatentWeights& weights, const float* cos_sin, float* slot) {
  isa.vector->rms_norm(slot, weights.kv_a_norm.data(), d.latent_eps, d.kv_lora_rank, slot);
  rope_rotate(cos_sin, rope.pairs(), rope.interleaved, slot + d.kv_lora_rank);
}

void finish_latent_query(const ModelDims& d, const Rope& rope, const float* cos_sin, float* query) {
  for (int64_t h = 0; h < d.num_heads; ++h)
    rope_rotate(cos_sin, rope.pairs(), rope.interleaved, query + h * d.query_dim() + d.nope_dim);
}

void finish_grouped_rows(const InstructionSet& isa, const ModelDims& d, const Rope& rope,
                         const GroupedWeights& weights, const float* cos_sin, float* query,
                         float* slot) {
  const int64_t query_width = d.num_heads * d.head_dim, key_width = d.num_kv_heads * d.head_dim;
  add_bias(isa, weights.q_bias, query);
  add_bias(isa, weights.k_bias, slot);
  add_bias(isa, weights.v_bias, slot + key_width);
  norm_heads(isa, weights.q_norm, d.rms_eps, query_width, query);
  norm_heads(isa, weights.k_norm, d.rms_eps, key_width, slot);
  clip(d.qkv_clip, query_width, query);
  clip(d.qkv_clip, 2 * key_width, slot);
  for (int64_t h = 0; h < d.num_heads; ++h)
    rope_rotate(cos_sin, rope.pairs(), rope.interleaved, query + h * d.head_dim);
  for (int64_t h = 0; h < d.num_kv_heads; ++h)
    rope_rotate(cos_sin, rope.pairs(), rope.interleaved, slot + h * d.head_dim);
}

}  // namespace moechat
