#include "decode/step.h"

#include <algorithm>
#include <cmath>

#include "common/status.h"
#include "kernels/attention/rows.h"
#include "kernels/matmul/blocks.h"
#include "kernels/matmul/product.h"
#include "model/draft_input.h"

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
  resize(query_, rows * d.num_heads * d.query_dim());
  resize(latent_query_, d.latent() ? rows * d.num_heads * d.kv_width() : 0);
  resize(head_values_, rows * d.num_heads * d.value_dim());
  resize(branch_, rows * d.hidden);
  resize(joined_, model.is_draft() ? rows * 2 * d.hidden : 0);
  resize(cos_sin_, rows * static_cast<int64_t>(model.ropes.size()) * 2 * model.rope_pairs());
  resize(router_logits_, rows * d.num_experts);
  resize(router_scratch_, 2 * d.num_experts + d.num_groups);
  resize(router_weights_, rows * d.experts_per_token);
  resize(shared_weights_, rows);
  router_ids_.resize(static_cast<size_t>(rows * d.experts_per_token));
  row_slots_.resize(static_cast<size_t>(rows));
  row_spans_.resize(static_cast<size_t>(rows));
  row_first_span_.resize(static_cast<size_t>(rows));
  calls_.resize(model.layers.size());
  worker_floats_.resize(static_cast<size_t>(pool.num_threads()));
  for (auto& floats : worker_floats_)
    resize(floats, std::max(attend_span_floats(d), rows * d.kv_lora_rank));
  build_job();
}

bool DecodeStep::run(const std::vector<StepRow>& rows, const CancelFlag* cancel) {
  all_tokens_.clear();
  const int64_t hidden = model_.dims.hidden;
  for (const StepRow& row : rows) {
    const int64_t first_logits = row.logits != nullptr ? row.num_tokens - row.num_logits
                                                       : row.num_tokens;
    for (int64_t i = 0; i < row.num_tokens; ++i)
      all_tokens_.push_back(
          {row.cache, row.tokens[i], row.position + static_cast<int32_t>(i),
           i < first_logits ? nullptr : row.logits + (i - first_logits) * model_.dims.vocab,
           row.hidden != nullptr ? row.hidden + i * hidden : nullptr,
           row.previous != nullptr ? row.previous + i * hidden : nullptr});
  }
  const auto total = static_cast<int64_t>(all_tokens_.size());
  for (int64_t first = 0; first < total; first += kMaxGemvRows)
    if (!run_chunk(all_tokens_.data() + first, std::min<int64_t>(kMaxGemvRows, total - first),
                   cancel))
      return false;
  return true;
}

void DecodeStep::build_job() {
  if (model_.is_draft()) add_draft_input();
  for (int64_t layer = 0; layer < static_cast<int64_t>(model_.layers.size()); ++layer) {
    if (model_.dims.latent())
      add_latent_inputs(layer);
    else
      add_grouped_inputs(layer);
    add_attention(layer);
    add_feed_forward(layer);
  }
  add_head();
}

bool DecodeStep::run_chunk(const TokenRow* tokens, int64_t count, const CancelFlag* cancel) {
  tokens_ = tokens;
  num_rows_ = count;
  first_bad_layer_ = -1;
  for (ExpertsCall& call : calls_) call.num_rows = count;
  const int64_t angles = static_cast<int64_t>(model_.ropes.size()) * 2 * model_.rope_pairs();
  for (int64_t r = 0; r < count; ++r) {
    if (!model_.is_draft()) embed(model_, tokens[r].token, x_.data() + r * model_.dims.hidden);
    model_angles(model_, tokens[r].position, cos_sin_.data() + r * angles);
  }
  job_.cancel = cancel;
  return pool_.run(Priority::kDecode, job_);
}

void DecodeStep::add_products(const char* name, std::function<void()> before,
                              std::vector<Product> products) {
  int64_t tasks = 0;
  for (const Product& product : products) tasks += num_blocks(*product.w);
  job_.phases.push_back(
      {[this, before = std::move(before), tasks, count = products.size()]() -> int64_t {
         before();
         inputs_ = new_input_names(count);
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
         const int64_t block = outputs_per_block(*product.w), begin = task * block;
         KeptInputs* kept =
             pool_.kept_inputs(worker, inputs_ + (product.x == products[0].x ? 0 : p));
         kept->expect(*product.w, begin + pool_.num_threads() * block);  // all workers take turns
         multiply(*isa_.matmul, *product.w, begin, std::min(begin + block, product.w->outputs()),
                  product.compute, x, num_rows_, y, pool_.scratch(worker), kept);
       },
       name});
}

void DecodeStep::add_draft_input() {
  const int64_t hidden = model_.dims.hidden;
  add_products("draft input",
               [this, hidden] {
                 for (int64_t r = 0; r < num_rows_; ++r)
                   join_draft_input(isa_, model_, tokens_[r].token, tokens_[r].previous,
                                    joined_.data() + r * 2 * hidden);
               },
               {{&model_.input.projection, model_.compute, joined_.data(), 2 * hidden, x_.data(),
                 hidden}});
}

void DecodeStep::norm_rows(const std::vector<float>& weight, float eps, const std::vector<float>& x,
                           int64_t width, std::vector<float>& y) {
  for (int64_t r = 0; r < num_rows_; ++r)
    isa_.vector->rms_norm(x.data() + r * width, weight.data(), eps, width, y.data() + r * width);
}

// Called with the residual stream that leaves `layer` (-1: the embedding).
void DecodeStep::check_finite(int64_t layer) {
  if (first_bad_layer_ < 0 && !all_finite(x_.data(), num_rows_ * model_.dims.hidden))
    first_bad_layer_ = std::max<int64_t>(layer, 0);
}

void DecodeStep::add_feed_forward(int64_t layer) {
  const ModelDims& d = model_.dims;
  const LayerWeights& own = weights(layer);
  std::vector<Product> products;
  if (own.is_moe)
    products.push_back({&own.router, Compute::kExact, normed_.data(), d.hidden,
                        router_logits_.data(), d.num_experts});
  if (own.shared_gate.data != nullptr)
    products.push_back(
        {&own.shared_gate, Compute::kExact, normed_.data(), d.hidden, shared_weights_.data(), 1});
  add_products("router", [this, layer] { open_feed_forward(layer); }, std::move(products));
  if (own.is_moe) add_products("router", [this, layer] { route_rows(layer); }, {});
  const bool post_norm = !own.post_ffn_norm.empty();
  ExpertsCall& call = calls_[static_cast<size_t>(layer)];
  call.dims = &d;
  call.layer = &own;
  call.compute = model_.compute;
  call.experts_per_token = d.experts_per_token;
  call.x = normed_.data();
  call.ids = router_ids_.data();
  call.weights = router_weights_.data();
  call.shared_weights = own.shared_gate.data != nullptr ? shared_weights_.data() : nullptr;
  call.y = post_norm ? branch_.data() : x_.data();
  call.accumulate = !post_norm;
  experts_.add_phases(job_, &call);
  if (post_norm) add_products("norm", [this, layer] { close_layer(layer); }, {});
}

// The attention branch joins the residual stream; the input of the MLP or the experts.
void DecodeStep::open_feed_forward(int64_t layer) {
  const ModelDims& d = model_.dims;
  const LayerWeights& own = weights(layer);
  for (int64_t r = 0; r < num_rows_; ++r) add_bias(isa_, own.o_bias, branch_.data() + r * d.hidden);
  if (!own.post_attention_norm.empty())
    norm_rows(own.post_attention_norm, d.rms_eps, branch_, d.hidden, branch_);
  isa_.vector->axpy(1.0f, branch_.data(), num_rows_ * d.hidden, x_.data());
  norm_rows(own.ffn_norm, d.rms_eps, x_, d.hidden, normed_);
}

void DecodeStep::route_rows(int64_t layer) {
  const ModelDims& d = model_.dims;
  const LayerWeights& own = weights(layer);
  for (int64_t r = 0; r < num_rows_; ++r) {
    float* logits = router_logits_.data() + r * d.num_experts;
    add_bias(isa_, own.router_bias, logits);
    route(d.router_rule(), logits,
          own.router_correction.empty() ? nullptr : own.router_correction.data(),
          router_scratch_.data(), router_ids_.data() + r * d.experts_per_token,
          router_weights_.data() + r * d.experts_per_token);
    if (own.shared_gate.data != nullptr) {
      float& gate = shared_weights_[static_cast<size_t>(r)];
      gate = 1.0f / (1.0f + std::exp(-gate));
    }
  }
}

void DecodeStep::close_layer(int64_t layer) {
  const ModelDims& d = model_.dims;
  norm_rows(weights(layer).post_ffn_norm, d.rms_eps, branch_, d.hidden, branch_);
  isa_.vector->axpy(1.0f, branch_.data(), num_rows_ * d.hidden, x_.data());
}

void DecodeStep::add_head() {
  const int64_t blocks = num_blocks(model_.head);
  job_.phases.push_back(
      {[this, blocks]() -> int64_t {
         const ModelDims& d = model_.dims;
         check_finite(static_cast<int64_t>(model_.layers.size()) - 1);
         logits_inputs_.clear();
         logits_rows_.clear();
         for (int64_t r = 0; r < num_rows_; ++r) {
           if (tokens_[r].logits == nullptr && tokens_[r].hidden == nullptr) continue;
           float* normed = normed_.data() + r * d.hidden;
           isa_.vector->rms_norm(x_.data() + r * d.hidden, model_.final_norm.data(), d.rms_eps,
                                 d.hidden, normed);
           if (tokens_[r].hidden != nullptr) std::copy_n(normed, d.hidden, tokens_[r].hidden);
           if (tokens_[r].logits == nullptr) continue;
           logits_inputs_.push_back(normed);
           logits_rows_.push_back(tokens_[r].logits);
         }
         inputs_ = new_input_names(1);
         return logits_rows_.empty() ? 0 : blocks;
       },
       [this](int64_t task, int worker) {
         const int64_t block = outputs_per_block(model_.head), begin = task * block;
         const int64_t end = std::min(begin + block, model_.head.outputs());
         KeptInputs* kept = pool_.kept_inputs(worker, inputs_);
         kept->expect(model_.head, begin + pool_.num_threads() * block);
         multiply(*isa_.matmul, model_.head, begin, end, model_.compute, logits_inputs_.data(),
                  static_cast<int64_t>(logits_inputs_.size()), logits_rows_.data(),
                  pool_.scratch(worker), kept);
         if (model_.dims.final_softcap <= 0) return;
         for (float* logits : logits_rows_)
           isa_.vector->softcap(logits + begin, model_.dims.final_softcap, end - begin);
       },
       "head"});
  add_products("head", [this] { check_logits(); }, {});
}

void DecodeStep::check_logits() const {
  bool finite = first_bad_layer_ < 0;
  for (const float* logits : logits_rows_) finite = finite && all_finite(logits, model_.dims.vocab);
  if (finite) return;
  throw_non_finite(first_bad_layer_);
}

}  // namespace moechat
