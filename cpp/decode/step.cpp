#include "decode/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/status.h"
#include "kernels/matmul/blocks.h"
#include "kernels/rope/rope.h"

namespace moechat {
namespace {

void resize(std::vector<float>& buffer, int64_t size) { buffer.resize(static_cast<size_t>(size)); }

}  // namespace

DecodeStep::DecodeStep(const Model& model, ThreadPool& pool)
    : model_(model), isa_(active_instruction_set()), pool_(pool), experts_(isa_, pool) {
  const ModelDims& d = model.dims;
  const int64_t rows = kMaxGemvRows;
  resize(x_, rows * d.hidden);
  resize(normed_, rows * d.hidden);
  resize(q_latent_, rows * d.q_lora_rank);
  resize(kv_, rows * d.kv_width());
  resize(query_, rows * d.num_heads * d.qk_dim());
  resize(latent_query_, rows * d.num_heads * d.kv_width());
  resize(head_values_, rows * d.num_heads * d.v_dim);
  resize(attention_, rows * d.hidden);
  resize(cos_sin_, rows * d.rope_dim);
  resize(router_logits_, rows * d.num_experts);
  resize(router_scratch_, 2 * d.num_experts + d.num_groups);
  resize(router_weights_, rows * d.experts_per_token);
  router_ids_.resize(static_cast<size_t>(rows * d.experts_per_token));
  row_spans_.resize(static_cast<size_t>(rows));
  row_first_span_.resize(static_cast<size_t>(rows));
  calls_.resize(model.layers.size());
  worker_floats_.resize(static_cast<size_t>(pool.num_threads()));
  for (auto& floats : worker_floats_)
    resize(floats, std::max(attend_span_floats(d), d.kv_lora_rank));
}

bool DecodeStep::run(const std::vector<StepRow>& rows, const CancelFlag* cancel) {
  std::vector<TokenRow> tokens;
  for (const StepRow& row : rows)
    for (int64_t i = 0; i < row.num_tokens; ++i)
      tokens.push_back({row.cache, row.tokens[i], row.position + static_cast<int32_t>(i),
                        i + 1 == row.num_tokens ? row.logits : nullptr});
  const auto total = static_cast<int64_t>(tokens.size());
  for (int64_t first = 0; first < total; first += kMaxGemvRows)
    if (!run_chunk(tokens.data() + first, std::min<int64_t>(kMaxGemvRows, total - first), cancel))
      return false;
  return true;
}

bool DecodeStep::run_chunk(const TokenRow* tokens, int64_t count, const CancelFlag* cancel) {
  tokens_ = tokens;
  num_rows_ = count;
  first_bad_layer_ = -1;
  const ModelDims& d = model_.dims;
  for (int64_t r = 0; r < count; ++r) {
    decode_row(model_.embedding, tokens[r].token, x_.data() + r * d.hidden);
    rope_angles(tokens[r].position, model_.rope_inverse_frequencies.data(), d.rope_dim / 2,
                d.rope_amplitude, cos_sin_.data() + r * d.rope_dim);
  }
  Job job;
  job.cancel = cancel;
  for (int64_t layer = 0; layer < static_cast<int64_t>(model_.layers.size()); ++layer) {
    add_attention_inputs(job, layer);
    add_attention(job, layer);
    add_feed_forward(job, layer);
  }
  add_head(job);
  return pool_.run(Priority::kDecode, job);
}

void DecodeStep::add_products(Job& job, std::function<void()> before,
                              std::vector<Product> products) {
  int64_t tasks = 0;
  for (const Product& product : products) tasks += num_blocks(*product.w);
  job.phases.push_back(
      {[before = std::move(before), tasks]() -> int64_t {
         before();
         return tasks;
       },
       [this, products = std::move(products)](int64_t task, int worker) {
         size_t p = 0;
         while (task >= num_blocks(*products[p].w)) task -= num_blocks(*products[p++].w);
         const Product& product = products[p];
         const float* x[kMaxGemvRows];
         float* y[kMaxGemvRows];
         for (int64_t r = 0; r < num_rows_; ++r) {
           x[r] = product.x + r * product.x_stride;
           y[r] = product.y + r * product.y_stride;
         }
         const int64_t block = rows_per_block(*product.w), begin = task * block;
         isa_.matmul->gemv(*product.w, begin, std::min(begin + block, product.w->rows),
                           product.compute, x, static_cast<int>(num_rows_), y,
                           pool_.scratch(worker));
       }});
}

void DecodeStep::norm_rows(const std::vector<float>& weight, float eps, std::vector<float>& x,
                           int64_t width, std::vector<float>& y) {
  for (int64_t r = 0; r < num_rows_; ++r)
    isa_.vector->rms_norm(x.data() + r * width, weight.data(), eps, width, y.data() + r * width);
}

// Called with the residual stream that leaves `layer` (-1: the embedding).
void DecodeStep::check_finite(int64_t layer) {
  if (first_bad_layer_ < 0 && !all_finite(x_.data(), num_rows_ * model_.dims.hidden))
    first_bad_layer_ = std::max<int64_t>(layer, 0);
}

void DecodeStep::add_attention_inputs(Job& job, int64_t layer) {
  const ModelDims& d = model_.dims;
  const LayerWeights& weights = model_.layers[static_cast<size_t>(layer)];
  const AttentionWeights& attention = weights.attention;
  const Product kv{&attention.kv_a, model_.compute, normed_.data(), d.hidden, kv_.data(),
                   d.kv_width()};
  const int64_t query_width = d.num_heads * d.qk_dim();
  auto norm = [this, layer, &weights, &d] {
    check_finite(layer - 1);
    norm_rows(weights.attention_norm, d.rms_eps, x_, d.hidden, normed_);
  };
  if (d.q_lora_rank == 0) {
    add_products(job, norm,
                 {{&attention.q_b, model_.compute, normed_.data(), d.hidden, query_.data(),
                   query_width},
                  kv});
    add_products(job, [this, layer] { store_latents(layer); }, {});
    return;
  }
  add_products(job, norm,
               {{&attention.q_a, model_.compute, normed_.data(), d.hidden, q_latent_.data(),
                 d.q_lora_rank},
                kv});
  add_products(job,
               [this, layer, &attention, &d] {
                 norm_rows(attention.q_a_norm, d.latent_eps, q_latent_, d.q_lora_rank, q_latent_);
                 store_latents(layer);
               },
               {{&attention.q_b, model_.compute, q_latent_.data(), d.q_lora_rank, query_.data(),
                 query_width}});
}

void DecodeStep::store_latents(int64_t layer) {
  const ModelDims& d = model_.dims;
  const AttentionWeights& attention = model_.layers[static_cast<size_t>(layer)].attention;
  for (int64_t r = 0; r < num_rows_; ++r) {
    float* row = kv_.data() + r * d.kv_width();
    isa_.vector->rms_norm(row, attention.kv_a_norm.data(), d.latent_eps, d.kv_lora_rank, row);
    rope_interleaved(cos_sin_.data() + r * d.rope_dim, d.rope_dim / 2, row + d.kv_lora_rank);
    tokens_[r].cache->append(layer, tokens_[r].position, row);
    row_spans_[static_cast<size_t>(r)] = tokens_[r].cache->num_slots(layer);
  }
}

void DecodeStep::rotate_queries() {
  const ModelDims& d = model_.dims;
  for (int64_t r = 0; r < num_rows_; ++r)
    for (int64_t h = 0; h < d.num_heads; ++h)
      rope_interleaved(cos_sin_.data() + r * d.rope_dim, d.rope_dim / 2,
                       query_.data() + (r * d.num_heads + h) * d.qk_dim() + d.nope_dim);
}

void DecodeStep::add_attention(Job& job, int64_t layer) {
  const ModelDims& d = model_.dims;
  const AttentionWeights& attention = model_.layers[static_cast<size_t>(layer)].attention;
  job.phases.push_back({[this, &d]() -> int64_t {
                          rotate_queries();
                          return num_rows_ * d.num_heads;
                        },
                        [this, &d, &attention](int64_t task, int worker) {
                          absorb_query(isa_, d, attention.kv_b,
                                       task % d.num_heads, query_.data() + task * d.qk_dim(),
                                       latent_query_.data() + task * d.kv_width(),
                                       pool_.scratch(worker));
                        }});
  job.phases.push_back({[this] { return plan_attention(); },
                        [this, layer](int64_t task, int worker) {
                          run_attention(layer, attention_tasks_[static_cast<size_t>(task)], worker);
                        }});
  job.phases.push_back({[this, &d] { return num_rows_ * d.num_heads; },
                        [this, layer, &d](int64_t task, int worker) {
                          run_join(layer, task / d.num_heads, task % d.num_heads, worker);
                        }});
  add_products(job, [] {},
               {{&attention.o, model_.compute, head_values_.data(), d.num_heads * d.v_dim,
                 attention_.data(), d.hidden}});
}

// A token attends to the slots up to and including its own. Tokens of one session in this step were
// appended in order, so its own slot is the one with its position.
int64_t DecodeStep::plan_attention() {
  const ModelDims& d = model_.dims;
  attention_tasks_.clear();
  int64_t total_spans = 0;
  for (int64_t r = 0; r < num_rows_; ++r) {
    const int64_t slots = row_spans_[static_cast<size_t>(r)];
    const int64_t spans = (slots + kSpanSlots - 1) / kSpanSlots;
    for (int64_t s = 0; s < spans; ++s)
      for (int64_t h = 0; h < d.num_heads; h += kHeadBlock)
        attention_tasks_.push_back({r, h, std::min(kHeadBlock, d.num_heads - h), total_spans + s,
                                    s * kSpanSlots, std::min(slots, (s + 1) * kSpanSlots)});
    row_first_span_[static_cast<size_t>(r)] = total_spans;
    row_spans_[static_cast<size_t>(r)] = spans;
    total_spans += spans;
  }
  resize(span_out_, total_spans * d.num_heads * d.kv_lora_rank);
  resize(span_max_, total_spans * d.num_heads);
  resize(span_sum_, total_spans * d.num_heads);
  return static_cast<int64_t>(attention_tasks_.size());
}

void DecodeStep::run_attention(int64_t layer, const AttentionTask& task, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t head = task.span * d.num_heads + task.head;
  attend_span(isa_, d, *tokens_[task.row].cache, layer, task.begin, task.end,
              latent_query_.data() + (task.row * d.num_heads + task.head) * d.kv_width(),
              task.heads, span_out_.data() + head * d.kv_lora_rank, span_max_.data() + head,
              span_sum_.data() + head, worker_floats_[static_cast<size_t>(worker)].data(),
              pool_.scratch(worker));
}

void DecodeStep::run_join(int64_t layer, int64_t row, int64_t head, int worker) {
  const ModelDims& d = model_.dims;
  const int64_t first = row_first_span_[static_cast<size_t>(row)] * d.num_heads + head;
  join_spans(isa_, d, model_.layers[static_cast<size_t>(layer)].attention.kv_b,
             head, row_spans_[static_cast<size_t>(row)], span_out_.data() + first * d.kv_lora_rank,
             d.num_heads * d.kv_lora_rank, span_max_.data() + first, span_sum_.data() + first,
             d.num_heads, head_values_.data() + (row * d.num_heads + head) * d.v_dim,
             worker_floats_[static_cast<size_t>(worker)].data(), pool_.scratch(worker));
}

void DecodeStep::add_feed_forward(Job& job, int64_t layer) {
  const ModelDims& d = model_.dims;
  const LayerWeights& weights = model_.layers[static_cast<size_t>(layer)];
  std::vector<Product> router;
  if (weights.is_moe)
    router.push_back({&weights.router, Compute::kExact, normed_.data(), d.hidden,
                      router_logits_.data(), d.num_experts});
  add_products(job,
               [this, &weights, &d] {
                 isa_.vector->axpy(1.0f, attention_.data(), num_rows_ * d.hidden, x_.data());
                 norm_rows(weights.ffn_norm, d.rms_eps, x_, d.hidden, normed_);
               },
               std::move(router));
  if (weights.is_moe) add_products(job, [this, layer] { route(layer); }, {});
  ExpertsCall& call = calls_[static_cast<size_t>(layer)];
  call.layer = &weights;
  call.compute = model_.compute;
  call.num_rows = num_rows_;
  call.hidden = d.hidden;
  call.experts_per_token = d.experts_per_token;
  call.x = normed_.data();
  call.ids = router_ids_.data();
  call.weights = router_weights_.data();
  call.y = x_.data();
  call.accumulate = true;
  experts_.add_phases(job, &call);
}

void DecodeStep::route(int64_t layer) {
  const ModelDims& d = model_.dims;
  const RouterRule rule = d.router_rule();
  for (int64_t r = 0; r < num_rows_; ++r)
    route_sigmoid(rule, router_logits_.data() + r * d.num_experts,
                  model_.layers[static_cast<size_t>(layer)].router_bias.data(),
                  router_scratch_.data(), router_ids_.data() + r * d.experts_per_token,
                  router_weights_.data() + r * d.experts_per_token);
}

void DecodeStep::add_head(Job& job) {
  const int64_t blocks = num_blocks(model_.head);
  job.phases.push_back(
      {[this, blocks]() -> int64_t {
         const ModelDims& d = model_.dims;
         check_finite(static_cast<int64_t>(model_.layers.size()) - 1);
         logits_inputs_.clear();
         logits_rows_.clear();
         for (int64_t r = 0; r < num_rows_; ++r) {
           if (tokens_[r].logits == nullptr) continue;
           float* normed = normed_.data() + r * d.hidden;
           isa_.vector->rms_norm(x_.data() + r * d.hidden, model_.final_norm.data(), d.rms_eps,
                                 d.hidden, normed);
           logits_inputs_.push_back(normed);
           logits_rows_.push_back(tokens_[r].logits);
         }
         return logits_rows_.empty() ? 0 : blocks;
       },
       [this](int64_t task, int worker) {
         const int64_t block = rows_per_block(model_.head), begin = task * block;
         isa_.matmul->gemv(model_.head, begin, std::min(begin + block, model_.head.rows),
                           model_.compute, logits_inputs_.data(),
                           static_cast<int>(logits_inputs_.size()), logits_rows_.data(),
                           pool_.scratch(worker));
       }});
  add_products(job, [this] { check_logits(); }, {});
}

void DecodeStep::check_logits() const {
  bool finite = first_bad_layer_ < 0;
  for (const float* logits : logits_rows_) finite = finite && all_finite(logits, model_.dims.vocab);
  if (finite) return;
  throw_non_finite(first_bad_layer_);
}

}  // namespace moechat
