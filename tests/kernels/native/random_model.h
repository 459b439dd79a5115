// A small model of random weights: two layers of routed and shared experts.
#pragma once
#include <deque>
#include <random>
#include <vector>

#include "common/number_formats.h"
#include "model/model.h"

namespace moechat_test {

using namespace moechat;

// Matrices and norms of random BF16 and float32 values.
class Values {
 public:
  MatrixView matrix(int64_t rows, int64_t cols) {
    std::vector<uint16_t>& stored = matrices_.emplace_back();
    for (int64_t i = 0; i < rows * cols; ++i)
      stored.push_back(f32_to_bf16(0.05f * static_cast<float>(random_() % 2001) / 1000 - 0.05f));
    MatrixView view;
    view.format = Format::kBF16;
    view.data = reinterpret_cast<const uint8_t*>(stored.data());
    view.rows = rows;
    view.cols = cols;
    view.row_stride_bytes = 2 * cols;
    return view;
  }
  MlpWeights mlp(int64_t hidden, int64_t inner) {
    MlpWeights weights;
    weights.gate = matrix(inner, hidden);
    weights.up = matrix(inner, hidden);
    weights.down = matrix(hidden, inner);
    return weights;
  }

 private:
  std::deque<std::vector<uint16_t>> matrices_;
  std::minstd_rand random_{1};
};

inline Model make_model(Values& values, bool latent) {
  Model model;
  ModelDims& d = model.dims;
  d.hidden = 64;
  d.vocab = 128;
  d.num_heads = 2;
  d.num_experts = 8;
  d.experts_per_token = 3;
  if (latent) {
    d.q_lora_rank = 32;
    d.kv_lora_rank = 32;
    d.nope_dim = d.rope_dim = d.v_dim = 32;
  } else {
    d.num_kv_heads = 1;
    d.head_dim = 32;
  }
  model.embedding = model.head = values.matrix(d.vocab, d.hidden);
  const std::vector<float> ones(64, 1.0f);
  model.final_norm = ones;
  model.ropes.push_back({std::vector<float>(16, 0.1f), 1.0f, false});
  for (int i = 0; i < 2; ++i) {
    LayerWeights& layer = model.layers.emplace_back();
    layer.attention_norm = layer.ffn_norm = ones;
    if (latent) {
      layer.latent.q_a = values.matrix(d.q_lora_rank, d.hidden);
      layer.latent.q_b = values.matrix(d.num_heads * d.query_dim(), d.q_lora_rank);
      layer.latent.kv_a = values.matrix(d.kv_width(), d.hidden);
      layer.latent.q_a_norm.assign(32, 1.0f);
      layer.latent.kv_a_norm.assign(32, 1.0f);
      for (int h = 0; h < 2; ++h) {
        layer.latent.key_expand.push_back(values.matrix(d.nope_dim, d.kv_lora_rank));
        layer.latent.value_expand.push_back(values.matrix(d.v_dim, d.kv_lora_rank));
      }
    } else {
      layer.grouped.q = values.matrix(d.num_heads * d.head_dim, d.hidden);
      layer.grouped.k = values.matrix(d.head_dim, d.hidden);
      layer.grouped.v = values.matrix(d.head_dim, d.hidden);
    }
    layer.o = values.matrix(d.hidden, d.num_heads * d.value_dim());
    layer.is_moe = layer.has_shared = true;
    layer.shared = values.mlp(d.hidden, 32);
    layer.router = values.matrix(d.num_experts, d.hidden);
    for (int e = 0; e < d.num_experts; ++e) layer.experts.push_back(values.mlp(d.hidden, 32));
  }
  return model;
}

}  // namespace moechat_test
