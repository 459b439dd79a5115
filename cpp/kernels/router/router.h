// DeepSeek-V3's router (technical report, section 2.1.2): sigmoid scores; groups and experts chosen
// by score + correction bias; weights from the scores alone.
#pragma once
#include <cstdint>

namespace moechat {

struct RouterRule {
  int64_t num_experts, experts_per_token, num_groups, groups_kept;
  bool normalise_weights;
  float routed_scaling;
};

// logits[num_experts] -> ids and weights[experts_per_token], by falling biased score, ties to the
// lower id. A group's score is the sum of its two best biased scores. NaN scores are chosen last;
// ids are distinct and in range whatever the logits are. scratch: 2 * num_experts + num_groups.
void route_sigmoid(const RouterRule& rule, const float* logits, const float* bias, float* scratch,
                   int32_t* ids, float* weights);

}  // namespace moechat
