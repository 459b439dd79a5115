#include "kernels/router/router.h"

#include <cmath>
#include <limits>

namespace moechat {
namespace {

constexpr float kLast = -std::numeric_limits<float>::infinity();
// Chosen already, or in a group that was left out: below every score, NaN's stand-in included.
constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();

// Index of the best entry that is not taken, ties to the lower; -1 when all are.
int64_t best_of(const float* values, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (values[i] == values[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

float group_score(const float* biased, int64_t n) {
  float first = kLast, second = kLast;
  for (int64_t i = 0; i < n; ++i) {
    if (biased[i] > first) {
      second = first;
      first = biased[i];
    } else if (biased[i] > second) {
      second = biased[i];
    }
  }
  const float sum = n > 1 ? first + second : first;
  return sum == sum ? sum : kLast;
}

}  // namespace

void route_sigmoid(const RouterRule& rule, const float* logits, const float* bias, float* scratch,
                   int32_t* ids, float* weights) {
  const int64_t experts = rule.num_experts, group_size = experts / rule.num_groups;
  float* score = scratch;
  float* biased = scratch + experts;
  float* groups = biased + experts;
  for (int64_t e = 0; e < experts; ++e) {
    score[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    const float sum = score[e] + bias[e];
    biased[e] = sum == sum ? sum : kLast;
  }
  if (rule.groups_kept < rule.num_groups) {
    for (int64_t g = 0; g < rule.num_groups; ++g)
      groups[g] = group_score(biased + g * group_size, group_size);
    for (int64_t kept = 0; kept < rule.groups_kept; ++kept) groups[best_of(groups, rule.num_groups)] = kTaken;
    for (int64_t g = 0; g < rule.num_groups; ++g)
      if (groups[g] == groups[g])
        for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) biased[e] = kTaken;
  }
  float sum = 1e-20f;
  for (int64_t k = 0; k < rule.experts_per_token; ++k) {
    const int64_t chosen = best_of(biased, experts);
    biased[chosen] = kTaken;
    ids[k] = static_cast<int32_t>(chosen);
    weights[k] = score[chosen];
    sum += score[chosen];
  }
  for (int64_t k = 0; k < rule.experts_per_token; ++k)
    weights[k] *= rule.normalise_weights ? rule.routed_scaling / sum : rule.routed_scaling;
}

}  // namespace moechat
