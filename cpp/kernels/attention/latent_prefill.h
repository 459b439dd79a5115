// Un-absorbed multi-head latent attention for prefill (DeepSeek-V2 paper, section 2.1): keys and
// values are expanded from the latents, some heads at a time.
//
// Shapes: T new tokens at slots [prefix, prefix + T); n = prefix + T keys, which may differ from
// layer to layer; G heads at a time.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/threads.h"
#include "kernels/attention/prefill_call.h"
#include "model/model.h"

namespace moechat {

class LatentPrefill {
 public:
  // `most_keys`: n of the layer that has the most.
  LatentPrefill(const Model& model, const InstructionSet& isa, ThreadPool& pool,
                int64_t num_tokens, int64_t most_keys);

  // Appends the phases for one layer. `q_input` [T][q_width]: the normalised query latent, or the
  // hidden state without q_lora; the other buffers as in the call.
  void add_phases(Job& job, const PrefillAttentionCall& call, const float* q_input,
                  int64_t q_width);

 private:
  // `head` is the model's, `place` its place in the group of heads at hand.
  void project_queries(const PrefillAttentionCall& call, int64_t head, int64_t place, int64_t block,
                       const float* q_input, int64_t q_width, int worker);
  void expand_keys(const PrefillAttentionCall& call, int64_t head, int64_t place, int64_t block,
                   int worker);
  QueryBlock queries(const PrefillAttentionCall& call, int64_t place, int64_t begin,
                     int64_t count) const;

  const Model& model_;
  const InstructionSet& isa_;
  ThreadPool& pool_;
  int64_t num_tokens_, group_heads_, query_block_;
  std::vector<float> query_;          // [G][T][query_dim]
  std::vector<float> key_, value_;    // [G][n][query_dim], [G][n][v_dim]
  std::vector<std::vector<float>> worker_floats_;
};

}  // namespace moechat
