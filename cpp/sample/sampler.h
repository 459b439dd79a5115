// Logits to a token. The chain, in this order:
//   repetition penalty  first, on raw logits, as its paper defines it (CTRL: positive logits
//                       divided, negative multiplied), once for every id of prompt or answer
//   presence penalty    an offset in logits (subtracted once for every id of the answer), so before
//                       temperature scales them
//   temperature         before the cuts, so that they see the probabilities that are drawn from;
//                       0 takes the best token, the lowest id among equals
//   top-k               a count, so the order does not matter to it; first, because it makes the
//                       rest cheap
//   top-p               the shortest falling prefix with at least this share of what top-k left
//   min-p               relative to the best token, which every cut keeps; so last or first alike
//   draw                inverse CDF over the falling order, by a number that depends on seed and
//                       position alone (design 3.14)
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/vector/vector_ops.h"
#include "sample/candidates.h"

namespace moechat {

struct SamplingParams {
  double temperature = 1.0;         // >= 0
  int64_t top_k = 0;                // 0: off
  double top_p = 1.0;               // (0, 1]
  double min_p = 0.0;               // [0, 1]
  double repetition_penalty = 1.0;  // > 0
  double presence_penalty = 0.0;    // finite
  uint64_t seed = 0;
};

// One answer's sampler. Not for two threads at once.
class Sampler {
 public:
  // Throws Status "bad-argument" for a parameter out of range.
  Sampler(const SamplingParams& params, int64_t vocab);

  int64_t vocab() const { return vocab_; }
  // Ids of the prompt: count for the repetition penalty. Throws "bad-argument" for an unknown id.
  void add_context(const int32_t* ids, int64_t count);
  // A token of the answer: counts for both penalties.
  void accept(int32_t id);
  // The token for `position`; logits [vocab]. Always in [0, vocab): when the best logit is not
  // finite or some are NaN, the largest that is a number. Does not change what later calls return.
  int32_t sample(const float* logits, uint64_t position);

 private:
  void check_id(int32_t id) const;
  const float* penalise(const float* logits);
  void gather_blocks(const float* scores, float best);
  void keep(const Prefix& prefix);
  void weigh();
  int32_t draw(uint64_t position);

  SamplingParams params_;
  int64_t vocab_;
  bool penalised_;  // else nothing is remembered
  const VectorKernels& kernels_;
  double temperature_ = 1.0;       // clamped to what float32 bears
  int32_t largest_key_ = 0;        // farther tokens get this one, and weigh nothing
  std::vector<uint8_t> seen_;      // per id: bit 0 in prompt or answer, bit 1 in the answer
  std::vector<int32_t> seen_ids_;  // ids with a bit set
  std::vector<float> scores_;      // penalised logits
  std::vector<float> block_best_;
  std::vector<int32_t> blocks_;
  Candidates candidates_;
  PrefixFinder finder_;
};

}  // namespace moechat
