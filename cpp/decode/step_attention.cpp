// The attention half of a decode step, latent and grouped.
#include <algorithm>

#include "decode/step.h"
#include "kernels/attention/latent_decode.h"
#include "kernels/attention/rows.h"

namespace moechat {

void DecodeStep::open_layer(int64_t layer) {
  check_finite(layer - 1);
  norm_rows(weights(layer).attention_norm, model_.dims.rms_eps, x_, model_.dims.hidden, normed_);
}

void DecodeStep::add_latent_inputs(int64_t layer) {
  const ModelDims& d = model_.dims;
  const LatentWeights& latent = weights(layer).latent;
  const Product kv{&latent.kv_a, model_.compute, normed_.data(), d.hidden, kv_.data(),
                   d.kv_width()};
  const int64_t query_width = d.num_heads * d.query_dim();
  if (d.q_lora_rank == 0) {
    add_products("attention.inputs", [this, layer] { open_layer(layer); },
                 {{&latent.q_b, model_.compute, normed_.data(), d.hidden, query_.data(),
                   query_width},
                  kv});
    add_products("attention.inputs", [this, layer] { store_latents(layer); }, {});
  } else {
    add_products("attention.inputs", [this, layer] { open_layer(layer); },
                 {{&latent.q_a, model_.compute, normed_.data(), d.hidden, q_latent_.data(),
                   d.q_lora_rank},
                  kv});
    add_products("attention.queries",
                 [this, layer, &latent, &d] {
                   norm_rows(latent.q_a_norm, d.latent_eps, q_latent_, d.q_lora_rank, q_latent_);
                   store_latents(layer);
                 },
                 {{&latent.q_b, model_.compute, q_latent_.data(), d.q_lora_rank, query_.data(),
                   query_width}});
  }
  job_.phases.push_back({[this, layer, &d]() -> int64_t {
                          rotate_queries(layer);
                          return d.num_heads;
                        },
                        [this, &d, &latent](int64_t head, int worker) {
                          absorb_queries(isa_, d, latent, head, num_rows_,
                                         query_.data() + head * d.query_dim(),
                                         d.num_heads * d.query_dim(),
                                         latent_query_.data() + head * d.kv_width(),
                                         d.num_heads * d.kv_width(), pool_.scratch(worker));
                        },
                        "attention.absorb"});
}

void DecodeStep::store_latents(int64_t layer) {
  const ModelDims& d = model_.dims;
  for (int64_t r = 0; r < num_rows_; ++r) {
    float* slot = kv_.data() + r * d.kv_width();
    finish_latent_slot(isa_, d, rope(layer), weights(layer).latent, cos_sin(layer, r), slot);
    tokens_[r].cache->append(layer, tokens_[r].position, slot);
    row_slots_[static_cast<size_t>(r)] = tokens_[r].cache->num_slots(layer);
  }
}

void DecodeStep::rotate_queries(int64_t layer) {
  const ModelDims& d = model_.dims;
  for (int64_t r = 0; r < num_rows_; ++r)
    finish_latent_query(d, rope(layer), cos_sin(layer, r),
                        query_.data() + r * d.num_heads * d.query_dim());
}

void DecodeStep::add_grouped_inputs(int64_t layer) {
  const ModelDims& d = model_.dims;
  const GroupedWeights& grouped = weights(layer).grouped;
  const int64_t key_width = d.num_kv_heads * d.head_dim;
  add_products("attention.inputs", [this, layer] { open_layer(layer); },
               {{&grouped.q, model_.compute, normed_.data(), d.hidden, query_.data(),
                 d.num_heads * d.head_dim},
                {&grouped.k, model_.compute, normed_.data(), d.hidden, kv_.data(), d.kv_width()},
                {&grouped.v, model_.compute, normed_.data(), d.hidden, kv_.data() + key_width,
                 d.kv_width()}});
  add_products("attention.inputs", [this, layer] { finish_grouped(layer); }, {});
}

void DecodeStep::finish_grouped(int64_t layer) {
  const ModelDims& d = model_.dims;
  for (int64_t r = 0; r < num_rows_; ++r) {
    float* slot = kv_.data() + r * d.kv_width();
    finish_grouped_rows(isa_, d, rope(layer), weights(layer).grouped, cos_sin(layer, r),
                        query_.data() + r * d.num_heads * d.head_dim, slot);
    tokens_[r].cache->append(layer, tokens_[r].position, slot);
    row_slots_[static_cast<size_t>(r)] = tokens_[r].cache->num_slots(layer);
  }
}

void DecodeStep::add_attention(int64_t layer) {
  const ModelDims& d = model_.dims;
  job_.phases.push_back({[this, layer] { return plan_attention(layer); },
                        [this, layer](int64_t task, int worker) {
                          run_attention(layer, attention_tasks_[static_cast<size_t>(task)], worker);
                        },
                        "attention.spans"});
  job_.phases.push_back({[&d] { return d.num_heads; },
                        [this, layer](int64_t head, int worker) { run_join(layer, head, worker); },
                        "attention.join"});
  add_products("attention.output", [] {},
               {{&weights(layer).o, model_.compute, head_values_.data(),
                 d.num_heads * d.value_dim(), branch_.data(), d.hidden}});
}

// A token attends to the slots up to and including its own. Tokens of one session in this step were
// appended in order, so its own slot is the one with its position.
int64_t DecodeStep::plan_attention(int64_t layer) {
  const ModelDims& d = model_.dims;
  attention_tasks_.clear();
  int64_t total_spans = 0;
  for (int64_t r = 0; r < num_rows_; ++r) {
    const TokenRow& token = tokens_[r];
    const int64_t first = token.cache->first_visible(layer, token.position);
    const int64_t slots = row_slots_[static_cast<size_t>(r)];
    const int64_t first_span = first / kSpanSlots;
    const int64_t spans = (slots + kSpanSlots - 1) / kSpanSlots - first_span;
    for (int64_t s = 0; s < spans; ++s) {
      const int64_t begin = std::max(first, (first_span + s) * kSpanSlots);
      const int64_t end = std::min(slots, (first_span + s + 1) * kSpanSlots);
      for (int64_t group = 0; group < d.num_heads; group += d.heads_per_group())
        for (int64_t h = 0; h < d.heads_per_group(); h += kHeadBlock)
          attention_tasks_.push_back({r, group + h, std::min(kHeadBlock, d.heads_per_group() - h),
                                      total_spans + s, begin, end});
    }
    row_first_span_[static_cast<size_t>(r)] = total_spans;
    row_spans_[static_cast<size_t>(r)] = spans;
    total_spans += spans;
  }
  span_out_.resize(static_cast<size_t>(total_spans * d.num_heads * attended_width(d)));
  span_max_.resize(static_cast<size_t>(total_spans * d.num_heads));
  span_sum_.resize(static_cast<size_t>(total_spans * d.num_heads));
  return static_cast<int64_t>(attention_tasks_.size());
}

void DecodeStep::run_attention(int64_t layer, const AttentionTask& task, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t place = task.span * d.num_heads + task.head;
  const SlotSegments segments = slot_segments(d, task.head);
  const std::vector<float>& queries = d.latent() ? latent_query_ : query_;
  attend_span(isa_, d, *tokens_[task.row].cache, layer, task.begin, task.end, segments,
              queries.data() + (task.row * d.num_heads + task.head) * segments.key_width, task.heads,
              span_out_.data() + place * segments.value_width, span_max_.data() + place,
              span_sum_.data() + place, worker_floats_[static_cast<size_t>(worker)].data(),
              pool_.scratch(worker));
}

// Of one head, all rows.
void DecodeStep::run_join(int64_t layer, int64_t head, int worker) {
  const ModelDims& d = model_.dims;
  const LayerWeights& own = weights(layer);
  const int64_t width = attended_width(d), stride = d.num_heads * d.value_dim();
  float* values = head_values_.data() + head * d.value_dim();
  float* latents = worker_floats_[static_cast<size_t>(worker)].data();
  for (int64_t r = 0; r < num_rows_; ++r) {
    const int64_t place = row_first_span_[static_cast<size_t>(r)] * d.num_heads + head;
    join_spans(isa_, row_spans_[static_cast<size_t>(r)], width, span_out_.data() + place * width,
               d.num_heads * width, span_max_.data() + place, span_sum_.data() + place, d.num_heads,
               own.sinks.empty() ? nullptr : own.sinks.data() + head,
               d.latent() ? latents + r * d.kv_lora_rank : values + r * stride);
  }
  if (d.latent())
    expand_values(isa_, d, own.latent, head, num_rows_, latents, values, stride,
                  pool_.scratch(worker));
}

}  // namespace moechat
