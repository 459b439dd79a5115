// The attention half of a prefill layer, latent and grouped.
#include <algorithm>

#include "kernels/attention/rows.h"
#include "prefill/prefill.h"

namespace moechat {

void Prefill::add_attention(Job& job, const LayerWeights& weights, float* window_mass,
                            int64_t window) {
  const ModelDims& d = model_.dims;
  add_rows(job, "attention.inputs", [this, &weights, &d](int64_t r) {
    isa_.vector->rms_norm(x_.data() + r * d.hidden, weights.attention_norm.data(), d.rms_eps,
                          d.hidden, normed_.data() + r * d.hidden);
  });
  add_prefix(job, weights);
  attention_ = {};
  attention_.layer = &weights;
  attention_.num_keys = num_keys();
  attention_.slots = slots_.data();
  attention_.cos_sin = cos_sin(weights, 0);
  attention_.cos_sin_stride = angles_;
  attention_.visible_begin = weights.window > 0 ? visible_begin_.data() : nullptr;
  attention_.values = values_.data();
  if (window_mass != nullptr) {
    head_mass_.assign(static_cast<size_t>(d.num_heads * num_keys()), 0.0f);
    attention_.head_mass = head_mass_.data();
    attention_.mass_window = std::min(window, num_tokens());
  }
  if (d.latent())
    add_latent_inputs(job, weights);
  else
    add_grouped_inputs(job, weights);
  if (window_mass != nullptr) add_mean_mass(job, window_mass);
  add_product(job, "attention.output", weights.o, model_.compute, num_tokens(), values_.data(),
              branch_.data(), d.hidden);
}

// Reads the slots before the span, as far as its tokens see them, and finds where each token's view
// begins.
void Prefill::add_prefix(Job& job, const LayerWeights& weights) {
  job.phases.push_back(
      {[this, &weights]() -> int64_t {
         visible_slot_ = cache_.first_visible(layer_, first_position_);
         if (weights.window > 0)
           for (int64_t r = 0; r < num_tokens(); ++r) {
             const int64_t own = r - weights.window + 1;  // the first token of the span that it sees
             visible_begin_[static_cast<size_t>(r)] =
                 own >= 0 ? prefix() + own : cache_.first_visible(layer_, first_position_ + r);
           }
         return ceil_div(prefix() - visible_slot_, kPageSlots);
       },
       [this](int64_t task, int) {
         const int64_t begin = visible_slot_ + task * kPageSlots;
         for (int64_t slot = begin; slot < std::min(begin + kPageSlots, prefix()); ++slot)
           cache_.decode(layer_, slot, slots_.data() + slot * cache_.width());
       },
       "attention.prefix"});
}

void Prefill::add_latent_inputs(Job& job, const LayerWeights& weights) {
  const ModelDims& d = model_.dims;
  const LatentWeights& latent = weights.latent;
  const bool low_rank = d.q_lora_rank > 0;
  const char* inputs = "attention.inputs";
  add_product(job, inputs, latent.kv_a, model_.compute, num_tokens(), normed_.data(), own_slot(0),
              d.kv_width());
  if (low_rank)
    add_product(job, inputs, latent.q_a, model_.compute, num_tokens(), normed_.data(),
                query_.data(), d.q_lora_rank);
  add_rows(job, "attention.inputs", [this, &weights, &d, low_rank](int64_t r) {
    finish_latent_slot(isa_, d, rope(weights), weights.latent, cos_sin(weights, r), own_slot(r));
    round_slot(r);
    if (!low_rank) return;
    float* row = query_.data() + r * d.q_lora_rank;
    isa_.vector->rms_norm(row, weights.latent.q_a_norm.data(), d.latent_eps, d.q_lora_rank, row);
  });
  latent_->add_phases(job, attention_, low_rank ? query_.data() : normed_.data(),
                      low_rank ? d.q_lora_rank : d.hidden);
}

void Prefill::add_grouped_inputs(Job& job, const LayerWeights& weights) {
  const ModelDims& d = model_.dims;
  const GroupedWeights& grouped = weights.grouped;
  const int64_t query_width = d.num_heads * d.head_dim;
  add_product(job, "attention.inputs", grouped.q, model_.compute, num_tokens(), normed_.data(),
              query_.data(), query_width);
  add_product(job, "attention.inputs", grouped.k, model_.compute, num_tokens(), normed_.data(),
              own_slot(0), d.kv_width());
  add_product(job, "attention.inputs", grouped.v, model_.compute, num_tokens(), normed_.data(),
              own_slot(0) + d.num_kv_heads * d.head_dim, d.kv_width());
  add_rows(job, "attention.inputs", [this, &weights, &d, query_width](int64_t r) {
    finish_grouped_rows(isa_, d, rope(weights), weights.grouped, cos_sin(weights, r),
                        query_.data() + r * query_width, own_slot(r));
    round_slot(r);
  });
  grouped_->add_phases(job, attention_, query_.data());
}

// One new slot's encoded form, and back, so that prefill attends to exactly what the cache will
// hold.
void Prefill::round_slot(int64_t row) {
  uint8_t* encoded = kv_encoded_.data() + row * cache_.slot_bytes();
  encode_slot(cache_.encoding(), own_slot(row), cache_.width(), encoded);
  decode_slot(cache_.encoding(), encoded, cache_.width(), own_slot(row));
}

void Prefill::add_mean_mass(Job& job, float* window_mass) {
  job.phases.push_back({[this, window_mass]() -> int64_t {
                          const int64_t n = num_keys(), heads = model_.dims.num_heads;
                          std::fill(window_mass, window_mass + n, 0.0f);
                          for (int64_t h = 0; h < heads; ++h)
                            isa_.vector->axpy(1.0f / static_cast<float>(heads),
                                              head_mass_.data() + h * n, n, window_mass);
                          return 0;
                        },
                        {}});
}

}  // namespace moechat
