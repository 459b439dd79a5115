// Un-absorbed multi-head latent attention for prefill (DeepSeek-V2 paper, section 2.1): keys and
// values are expanded from the latents head by head, scores are blocked with a running softmax, so
// that memory is linear in the length. No score matrix is ever stored. Float32 in both compute modes.
//
// Shapes: T new tokens at slots [prefix, prefix + T); n = prefix + T keys; G heads at a time.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/threads.h"
#include "model/model.h"

namespace moechat {

class PrefillAttention {
 public:
  PrefillAttention(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                   int64_t num_tokens, int64_t num_keys);

  // Appends the phases for one layer.
  //   latents  [n][kv_width]  float32 values of the cache's own encoding, filled when phases open
  //   q_input  [T][q_width]   normalised query latent (or hidden state without q_lora)
  //   cos_sin  [T][rope_dim]  angles of the new tokens
  //   values   [T][num_heads * v_dim]  result
  //   window_mass [n] or null: for each key, the mean over heads of the summed attention
  //     probability that the last `window` queries give it.
  void add_phases(Job& job, const AttentionWeights& weights, const float* latents,
                  const float* q_input, int64_t q_width, const float* cos_sin, float* values,
                  float* window_mass, int64_t window);

 private:
  // `head` is the model's, `slot` its place in the group of heads at hand.
  void project_queries(const AttentionWeights& weights, int64_t head, int64_t slot, int64_t block,
                       const float* q_input, int64_t q_width, const float* cos_sin, int worker);
  void expand_keys(const AttentionWeights& weights, int64_t head, int64_t slot, int64_t block,
                   const float* latents, int worker);
  void attend(int64_t head, int64_t slot, int64_t block, float* values, int worker);
  void sum_window(int64_t head, int64_t slot, int64_t window, int worker);
  MatrixView float_view(const std::vector<float>& buffer, int64_t slot, int64_t cols) const;
  MatrixView keys(int64_t slot) const;
  MatrixView values(int64_t slot) const;

  const Model& model_;
  const InstructionSet& isa_;
  ThreadPool& pool_;
  int64_t num_tokens_, num_keys_, group_heads_, query_block_;
  std::vector<float> query_;          // [G][T][qk_dim]
  std::vector<float> key_, value_;    // [G][n][qk_dim], [G][n][v_dim]
  std::vector<float> head_mass_;      // [num_heads][n], only with a window
  std::vector<std::vector<float>> worker_floats_;
};

}  // namespace moechat
