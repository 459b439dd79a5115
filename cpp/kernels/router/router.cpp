#include "kernels/router/router.h"

#include <algorithm>
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

// What a group counts for: its best score, or the sum of its two best.
float group_score(const float* selection, int64_t n, bool two) {
  float first = kLast, second = kLast;
  for (int64_t i = 0; i < n; ++i) {
    if (selection[i] > first) {
      second = first;
      first = selection[i];
    } else if (selection[i] > second) {
      second = selection[i];
    }
  }
  const float sum = two && n > 1 ? first + second : first;
  return sum == sum ? sum : kLast;
}

// weights = softmax of values, the largest first.
void softmax(const float* values, int64_t n, float* weights) {
  float best = kLast, sum = 0;
  for (int64_t i = 0; i < n; ++i) best = values[i] > best ? values[i] : best;
  for (int64_t i = 0; i < n; ++i) {
    weights[i] = std::exp(values[i] - best);
    sum += weights[i];
  }
  for (int64_t i = 0; i < n; ++i) weights[i] /= sum;
}

void score_all(const RouterRule& rule, const float* logits, float* score) {
  switch (rule.scoring) {
    case Scoring::kSigmoid:
      for (int64_t e = 0; e < rule.num_experts; ++e) score[e] = 1.0f / (1.0f + std::exp(-logits[e]));
      return;
    case Scoring::kSoftmax: return softmax(logits, rule.num_experts, score);
    case Scoring::kSoftmaxChosen: std::copy_n(logits, rule.num_experts, score); return;
  }
}

}  // namespace

void route(const RouterRule& rule, const float* logits, const float* correction, float* scratch,
           int32_t* ids, float* weights) {
  const int64_t experts = rule.num_experts, group_size = experts / rule.num_groups;
  float* score = scratch;
  float* selection = scratch + experts;
  float* groups = selection + experts;
  score_all(rule, logits, score);
  for (int64_t e = 0; e < experts; ++e) {
    const float sum = correction != nullptr ? score[e] + correction[e] : score[e];
    selection[e] = sum == sum ? sum : kLast;
  }
  if (rule.groups_kept < rule.num_groups) {
    const bool two = rule.scoring == Scoring::kSigmoid;
    for (int64_t g = 0; g < rule.num_groups; ++g)
      groups[g] = group_score(selection + g * group_size, group_size, two);
    for (int64_t kept = 0; kept < rule.groups_kept; ++kept)
      groups[best_of(groups, rule.num_groups)] = kTaken;
    for (int64_t g = 0; g < rule.num_groups; ++g)
      if (groups[g] == groups[g])
        for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) selection[e] = kTaken;
  }
  for (int64_t k = 0; k < rule.experts_per_token; ++k) {
    const int64_t chosen = best_of(selection, experts);
    selection[chosen] = kTaken;
    ids[k] = static_cast<int32_t>(chosen);
    weights[k] = score[chosen];
  }
  if (rule.scoring == Scoring::kSoftmaxChosen) softmax(weights, rule.experts_per_token, weights);
  float sum = 1e-20f;
  for (int64_t k = 0; k < rule.experts_per_token; ++k) sum += weights[k];
  for (int64_t k = 0; k < rule.experts_per_token; ++k)
    weights[k] *= rule.normalise_weights ? rule.routed_scaling / sum : rule.routed_scaling;
}

}  // namespace moechat
