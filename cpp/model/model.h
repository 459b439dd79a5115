// What a model is to native code: dimensions and views of its weights, for every layer.
#pragma once
#include <cstdint>
#include <vector>

#include "common/matrix_view.h"
#include "kernels/matmul/matmul.h"
#include "kernels/router/router.h"

namespace moechat {

struct ModelDims {
  int64_t hidden = 0, vocab = 0, num_heads = 0;
  int64_t q_lora_rank = 0;  // 0: q is projected directly from the hidden state
  int64_t kv_lora_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  int64_t num_experts = 0, experts_per_token = 0, num_groups = 1, groups_kept = 1;
  bool normalise_weights = false;
  float routed_scaling = 1, rms_eps = 1e-6f, latent_eps = 1e-6f, softmax_scale = 1;
  float rope_amplitude = 1;  // YaRN's factor on cos and sin

  int64_t qk_dim() const { return nope_dim + rope_dim; }
  RouterRule router_rule() const {
    return {num_experts, experts_per_token, num_groups, groups_kept, normalise_weights, routed_scaling};
  }
  int64_t kv_width() const { return kv_lora_rank + rope_dim; }  // elements of one cache slot
};

// Gated MLP: down(silu(gate x) * up x). Dense layers, shared experts and routed experts alike.
struct MlpWeights {
  MatrixView gate, up, down;
};

// Multi-head latent attention (DeepSeek-V2 paper, section 2.1). kv_b rows of head h: nope_dim rows
// of the key expansion, then v_dim rows of the value expansion.
struct AttentionWeights {
  MatrixView q_a;  // unused when q_lora_rank is 0
  MatrixView q_b, kv_a, kv_b, o;
  std::vector<float> q_a_norm, kv_a_norm;
};

struct LayerWeights {
  std::vector<float> attention_norm, ffn_norm;
  AttentionWeights attention;
  bool is_moe = false;
  bool has_shared = false;
  MlpWeights dense;   // when !is_moe
  MlpWeights shared;  // when has_shared
  MatrixView router;  // [experts, hidden]
  std::vector<float> router_bias;
  std::vector<MlpWeights> experts;
};

struct Model {
  ModelDims dims;
  Compute compute = Compute::kBF16;
  MatrixView embedding, head;
  std::vector<float> final_norm;
  std::vector<float> rope_inverse_frequencies;  // rope_dim / 2
  std::vector<LayerWeights> layers;
};

// Throws Status "non-finite-logits" naming the layer (-1: the head).
[[noreturn]] void throw_non_finite(int64_t first_bad_layer);

// True when no element is NaN or infinite.
bool all_finite(const float* x, int64_t n);

// dst[cols] = one row of any view as float32.
void decode_row(const MatrixView& view, int64_t row, float* dst);

}  // namespace moechat
