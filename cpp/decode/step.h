// One decode step (design 3.2): rows of one or many sessions through all layers in one native call.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/threads.h"
#include "kernels/attention/spans.h"
#include "kernels/experts/experts.h"
#include "kernels/router/router.h"
#include "kv/cache.h"
#include "model/model.h"

namespace moechat {

// 1..k tokens of one session. Their KV is appended to `cache`; positions count on from `position`.
struct StepRow {
  KVCache* cache = nullptr;
  const int32_t* tokens = nullptr;
  int64_t num_tokens = 0;
  int32_t position = 0;
  float* logits = nullptr;  // [num_logits][vocab] of the last tokens; null when not wanted
  int64_t num_logits = 1;
  float* hidden = nullptr;  // [num_tokens][hidden] after the final norm; null when not wanted
  // Of a draft model, whose tokens are those after the positions: [num_tokens][hidden], the hidden
  // states of the main model at the positions.
  const float* previous = nullptr;
};

// Runs steps for one model on one pool; keeps its buffers. One thread at a time.
class DecodeStep {
 public:
  DecodeStep(const Model& model, ThreadPool& pool);
  // Throws Status "non-finite-logits" naming the first layer whose output was not finite; the
  // caches then hold the step's slots and must be truncated by the caller. Returns false when
  // `cancel` cut the step short, likewise.
  bool run(const std::vector<StepRow>& rows, const CancelFlag* cancel);
  const Model& model() const { return model_; }

 private:
  // One token on its way through the layers.
  struct TokenRow {
    KVCache* cache;
    int32_t token, position;
    float* logits;
    float* hidden;
    const float* previous;
  };
  // A piece of attention: heads [head, head + heads) of row `row` over one span of slots.
  struct AttentionTask {
    int64_t row, head, heads, span, begin, end;
  };
  // y[r] = w x[r] for every token row, as tasks of one phase.
  struct Product {
    const MatrixView* w;
    Compute compute;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
  };

  void build_job();
  bool run_chunk(const TokenRow* tokens, int64_t count, const CancelFlag* cancel);
  void add_products(const char* name, std::function<void()> before, std::vector<Product> products);
  void add_draft_input();
  void norm_rows(const std::vector<float>& weight, float eps, const std::vector<float>& x,
                 int64_t width, std::vector<float>& y);
  void check_finite(int64_t layer);

  // step_attention.cpp
  void add_latent_inputs(int64_t layer);
  void add_grouped_inputs(int64_t layer);
  void open_layer(int64_t layer);
  void store_latents(int64_t layer);
  void finish_grouped(int64_t layer);
  void rotate_queries(int64_t layer);
  void add_attention(int64_t layer);
  int64_t plan_attention(int64_t layer);
  void run_attention(int64_t layer, const AttentionTask& task, int worker);
  void run_join(int64_t layer, int64_t head, int worker);

  void add_feed_forward(int64_t layer);
  void open_feed_forward(int64_t layer);
  void route_rows(int64_t layer);
  void close_layer(int64_t layer);
  void add_head();
  void check_logits() const;
  const LayerWeights& weights(int64_t layer) const {
    return model_.layers[static_cast<size_t>(layer)];
  }
  const Rope& rope(int64_t layer) const {
    return model_.ropes[static_cast<size_t>(weights(layer).rope)];
  }
  const float* cos_sin(int64_t layer, int64_t row) const {
    const auto ropes = static_cast<int64_t>(model_.ropes.size());
    return cos_sin_.data() + (row * ropes + weights(layer).rope) * 2 * model_.rope_pairs();
  }

  const Model& model_;
  const InstructionSet& isa_;
  ThreadPool& pool_;
  Experts experts_;
  std::vector<ExpertsCall> calls_;  // one a layer: phases keep pointers to them
  uint64_t inputs_ = 0;  // of the phase that runs: the name of its first product's x
  Job job_;  // of every chunk: phases ask for the rows when they open

  std::vector<TokenRow> all_tokens_;
  const TokenRow* tokens_ = nullptr;
  int64_t num_rows_ = 0;
  int64_t first_bad_layer_ = -1;
  // Activations, one row a token: residual, normalised input, latent query, KV slot, query, ...
  std::vector<float> x_, normed_, q_latent_, kv_, query_, latent_query_, head_values_, branch_;
  std::vector<float> router_logits_, router_scratch_, router_weights_, shared_weights_;
  std::vector<float> cos_sin_;  // [rows][ropes][2 * pairs]
  std::vector<float> joined_;   // [rows][2 * hidden], of a draft model
  std::vector<float*> logits_rows_;
  std::vector<const float*> logits_inputs_;
  std::vector<int32_t> router_ids_;
  std::vector<AttentionTask> attention_tasks_;
  std::vector<int64_t> row_slots_;                   // of each row: slots up to its own
  std::vector<int64_t> row_spans_, row_first_span_;  // of each row: number, index of the first
  std::vector<float> span_out_, span_max_, span_sum_;
  std::vector<std::vector<float>> worker_floats_;
};

}  // namespace moechat
