// CPU prefill: one span of new tokens, layer by layer (layer-major, design 2). Layer l's KV of the
// span stays here until the caller sends it as a packet; earlier slots are read from the cache.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/threads.h"
#include "kernels/attention/grouped_prefill.h"
#include "kernels/attention/latent_prefill.h"
#include "kernels/experts/experts.h"
#include "kv/cache.h"
#include "model/model.h"

namespace moechat {

class Prefill {
 public:
  // `tokens` begin at `first_position`, up to which every layer of `cache` is complete. Layers may
  // hold different numbers of slots: what a policy dropped is absent.
  Prefill(const Model& model, ThreadPool& pool, const KVCache& cache, std::vector<int32_t> tokens,
          int64_t first_position);

  // The same span on its way through the draft layer, once all layers have run: position i of it
  // takes this model's hidden state at i and the token at i + 1. `next_token` follows the span;
  // -1: unknown, the last position is left out. `cache` is the draft layer's, whose slots may lack
  // positions. This object is spent, its buffers are freed. Null when `cancel` cut it or nothing
  // is left to run.
  std::unique_ptr<Prefill> draft(const KVCache& cache, int32_t next_token,
                                 const CancelFlag* cancel);
  bool is_of(const Model& model) const { return &model_ == &model; }
  int64_t first_position() const { return first_position_; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  KVEncoding encoding() const { return cache_.encoding(); }
  int64_t kv_width() const { return cache_.width(); }
  int64_t vocab() const { return model_.dims.vocab; }
  int64_t num_keys() const { return prefix() + num_tokens(); }  // of the next layer
  // Runs the next layer. Afterwards kv() holds its slots. `window_mass` [num_keys] or null: for each
  // key, the mean over heads of the summed attention probability that the last `window` queries
  // give it. Returns false when `cancel` cut it; throws Status "non-finite-logits" naming the
  // layer. The object is spent after either.
  bool run_layer(const CancelFlag* cancel, float* window_mass, int64_t window);
  // Whether the cache still holds what the next layer's tokens see of the prefix.
  bool prefix_held() const {
    const int64_t window = cache_.window(layer_);
    const int64_t needed = window > 0 ? std::max<int64_t>(0, first_position_ - window + 1) : 0;
    return cache_.num_slots(layer_) >= prefix() && cache_.begin_position(layer_) <= needed;
  }
  // Past num_layers() once a layer was cut or failed.
  int64_t next_layer() const { return spent_ ? num_layers() + 1 : layer_; }
  int64_t num_layers() const { return static_cast<int64_t>(model_.layers.size()); }
  // The span's slots of the layer run last, in the cache's encoding: [num_tokens][slot_bytes].
  const std::vector<uint8_t>& kv() const { return kv_encoded_; }
  // Experts chosen in the layer run last: [num_tokens][experts_per_token]; empty for a dense layer.
  const std::vector<int32_t>& router_ids() const { return router_ids_; }
  // Residual stream after the layer run last: [num_tokens][hidden].
  const std::vector<float>& hidden() const { return x_; }
  // Logits of tokens [first, num_tokens) after the last layer: out[...][vocab]. Throws Status
  // "non-finite-logits". Returns false when cut.
  bool logits(const CancelFlag* cancel, int64_t first, float* out);

 private:
  bool join_draft_inputs(const std::vector<float>& hidden, const CancelFlag* cancel);
  void add_rows(Job& job, const char* name, std::function<void(int64_t row)> body);
  void add_product(Job& job, const char* name, const MatrixView& w, Compute compute, int64_t rows, const float* x,
                   float* y, int64_t y_stride);
  void add_attention(Job& job, const LayerWeights& weights, float* window_mass, int64_t window);
  void add_latent_inputs(Job& job, const LayerWeights& weights);
  void add_grouped_inputs(Job& job, const LayerWeights& weights);
  void add_mean_mass(Job& job, float* window_mass);
  void add_feed_forward(Job& job, const LayerWeights& weights);
  void add_experts(Job& job, const LayerWeights& weights);
  void add_prefix(Job& job, const LayerWeights& weights);
  void add_embedding(Job& job);
  void round_slot(int64_t row);
  void join_attention(const LayerWeights& weights, int64_t row);
  void route_row(const LayerWeights& weights, int64_t row);
  float* own_slot(int64_t row) {
    return slots_.data() + (prefix() + row) * model_.dims.kv_width();
  }
  int64_t prefix() const { return prefixes_[static_cast<size_t>(layer_)]; }
  const float* cos_sin(const LayerWeights& weights, int64_t row) const {
    return cos_sin_.data() + row * angles_ + weights.rope * 2 * model_.rope_pairs();
  }
  const Rope& rope(const LayerWeights& weights) const {
    return model_.ropes[static_cast<size_t>(weights.rope)];
  }

  const Model& model_;
  const InstructionSet& isa_;
  ThreadPool& pool_;
  const KVCache& cache_;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> prefixes_;  // slots that each layer of the cache holds before the span
  int64_t first_position_, layer_ = 0;
  int64_t visible_slot_ = 0;  // the first slot of the prefix that the layer at hand needs
  int64_t angles_;  // floats of cos_sin_ a token
  bool spent_ = false;
  Experts experts_;
  std::vector<ExpertsCall> calls_;
  PrefillAttentionCall attention_;
  std::optional<LatentPrefill> latent_;    // one of the two
  std::optional<GroupedPrefill> grouped_;
  std::vector<float> x_, normed_, query_, values_, branch_, cos_sin_;
  std::vector<float> slots_;               // [num_keys][kv_width], of the layer at hand
  std::vector<float> head_mass_;
  std::vector<int64_t> visible_begin_;     // [num_tokens], with a window
  std::vector<float> router_logits_, router_weights_, shared_weights_;
  std::vector<int32_t> router_ids_;
  std::vector<uint8_t> kv_encoded_;
};

}  // namespace moechat
