// Which experts a token goes to, and with which weights.
#pragma once
#include <cstdint>

namespace moechat {

// How logits become scores, and chosen scores weights.
enum class Scoring : uint8_t {
  kSigmoid,        // DeepSeek-V3 (technical report, section 2.1.2): a group counts its two best
  kSoftmax,        // over all experts; a group counts its best (DeepSeek-V2 paper, section 2.2.2)
  kSoftmaxChosen,  // chosen by logit; softmax over the chosen alone (gpt-oss)
};

struct RouterRule {
  int64_t num_experts, experts_per_token, num_groups, groups_kept;
  Scoring scoring;
  bool normalise_weights;  // the chosen weights are divided by their sum
  float routed_scaling;
};

// logits[num_experts] -> ids and weights[experts_per_token], by falling selection score, ties to the
// lower id. `correction` [num_experts] or null is added for the selection alone. NaN scores are
// chosen last; ids are distinct and in range whatever the logits are.
// scratch: 2 * num_experts + num_groups.
void route(const RouterRule& rule, const float* logits, const float* correction, float* scratch,
           int32_t* ids, float* weights);

}  // namespace moechat
