// What a model is to native code: dimensions and views of its weights, for every layer. Where
// architectures differ, a field says how; an optional part is an empty vector or a null view.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "common/matrix_view.h"
#include "kernels/matmul/matmul.h"
#include "kernels/router/router.h"

namespace moechat {

enum class Activation : uint8_t { kSilu, kGeluTanh, kSwigluClamped };

struct ModelDims {
  int64_t hidden = 0, vocab = 0, num_heads = 0;
  // Latent attention, when kv_lora_rank > 0.
  int64_t q_lora_rank = 0;  // 0: q is projected directly from the hidden state
  int64_t kv_lora_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  float latent_eps = 1e-6f;
  // Grouped-query attention otherwise.
  int64_t num_kv_heads = 0, head_dim = 0;
  float qkv_clip = 0;  // 0: none

  float softmax_scale = 1, attention_softcap = 0, final_softcap = 0;  // caps of 0: none
  float rms_eps = 1e-6f, embedding_scale = 1;
  Activation activation = Activation::kSilu;
  float activation_limit = 0, activation_alpha = 0;
  int64_t num_experts = 0, experts_per_token = 0, num_groups = 1, groups_kept = 1;
  Scoring scoring = Scoring::kSigmoid;
  bool normalise_weights = false;
  float routed_scaling = 1;

  bool latent() const { return kv_lora_rank > 0; }
  int64_t query_dim() const { return latent() ? nope_dim + rope_dim : head_dim; }  // of a head
  int64_t value_dim() const { return latent() ? v_dim : head_dim; }
  int64_t heads_per_group() const { return latent() ? num_heads : num_heads / num_kv_heads; }
  int64_t kv_segments() const { return latent() ? 1 : 2 * num_kv_heads; }  // of a cache slot
  int64_t kv_width() const {  // elements of one cache slot
    return latent() ? kv_lora_rank + rope_dim : 2 * num_kv_heads * head_dim;
  }
  RouterRule router_rule() const {
    return {num_experts, experts_per_token, num_groups, groups_kept,
            scoring,     normalise_weights, routed_scaling};
  }
};

struct Rope {
  std::vector<float> inverse_frequencies;
  float amplitude = 1;  // on cos and sin
  bool interleaved = false;
  int64_t pairs() const { return static_cast<int64_t>(inverse_frequencies.size()); }
};

// One node's share of an MLP: inner elements [begin, begin + gate.outputs()), that is outputs of
// gate and up, inputs of down. Null views when it has none.
struct MlpPart {
  MatrixView gate, up, down;
  int64_t begin = 0;
  bool empty() const { return gate.data == nullptr; }
};

// Gated MLP: down(activation(gate x, up x)). Dense layers, shared experts and routed experts alike.
struct MlpWeights {
  MatrixView gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;  // or empty
  // One a node when the MLP is resident (resident.h), of which the first is never empty; else none.
  std::vector<MlpPart> parts{};
};

// Multi-head latent attention (DeepSeek-V2 paper, section 2.1): the key and value expansions of
// every head stand apart.
struct LatentWeights {
  MatrixView q_a;  // unused when q_lora_rank is 0
  MatrixView q_b, kv_a;
  std::vector<MatrixView> key_expand, value_expand;  // [num_heads]: [nope_dim, rank], [v_dim, rank]
  std::vector<float> q_a_norm, kv_a_norm;
};

// Grouped-query attention. The norms of q and k are over a head, or over the whole row when they are
// that long.
struct GroupedWeights {
  MatrixView q, k, v;
  std::vector<float> q_bias, k_bias, v_bias, q_norm, k_norm;  // or empty
};

struct LayerWeights {
  int64_t window = 0;  // positions seen, the own one included; 0: all
  int64_t rope = 0;    // index into Model::ropes
  std::vector<float> attention_norm, ffn_norm;
  std::vector<float> post_attention_norm, post_ffn_norm;  // of the branch, before it is added
  LatentWeights latent;
  GroupedWeights grouped;
  MatrixView o;
  std::vector<float> o_bias, sinks;  // or empty; sinks: one more logit a head
  bool is_moe = false;
  bool has_shared = false;
  MlpWeights dense;   // when !is_moe
  MlpWeights shared;  // when has_shared
  MatrixView shared_gate;  // [1, hidden]: the shared expert is weighed by its sigmoid; or null
  MatrixView router;       // [experts, hidden]
  std::vector<float> router_bias, router_correction;  // or empty
  std::vector<MlpWeights> experts;
  int64_t num_parts = 1;  // sums that the MLPs' outputs are joined of
};

// How a draft layer makes its input of a token and of the hidden state before it; see
// draft_input.h. Its projection is null in any other model.
struct DraftInput {
  std::vector<float> token_norm, hidden_norm;
  MatrixView projection;  // [hidden, 2 * hidden]
};

struct Model {
  ModelDims dims;
  Compute compute = Compute::kBF16;
  MatrixView embedding, head;
  std::vector<float> final_norm;
  std::vector<Rope> ropes;  // all of the same number of pairs
  std::vector<LayerWeights> layers;
  DraftInput input;
  // The multi-token-prediction layer, as a model of one layer with a head; null when it was not
  // asked for.
  std::shared_ptr<Model> draft;

  bool is_draft() const { return input.projection.data != nullptr; }
  int64_t rope_pairs() const { return ropes[0].pairs(); }
  std::vector<int64_t> windows() const;  // of every layer
};

// Throws Status "non-finite-logits" naming the layer (-1: the head).
[[noreturn]] void throw_non_finite(int64_t first_bad_layer);

// True when no element is NaN or infinite.
bool all_finite(const float* x, int64_t n);

// x[hidden] = the embedding of one token, scaled as the model scales it.
void embed(const Model& model, int32_t token, float* x);

// cos and sin of one position for every rope: [ropes][2 * pairs].
void model_angles(const Model& model, int64_t position, float* cos_sin);

}  // namespace moechat
