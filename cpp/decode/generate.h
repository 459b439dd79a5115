// The decode loop: step, sample, step again, without the interpreter lock in between (design 3.7).
//
// With a drafter, a step verifies the drafted token as a second row. The target's row decides with
// the sampler and the counter of its position, as it would without: a draft is taken if and only if
// it is what was sampled. So the text never depends on drafts (design 3.14).
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/threads.h"
#include "decode/generation.h"
#include "decode/step.h"

namespace moechat {

// Steps all generations together until one of them finishes, `interrupt` is raised or `max_steps`
// (0: no limit) are done, but once at least; returns how many were. Generations whose queue is full sit out. When
// DecodeStep::run throws a Status, those that it throws for alone have failed; the others go on as
// if they had never been beside them. All caches are truncated to the tokens before the step, as
// for anything else that is thrown.
int64_t generate(DecodeStep& step, const std::vector<Generation*>& generations, int64_t vocab,
                 const CancelFlag& interrupt, int64_t max_steps);

}  // namespace moechat
