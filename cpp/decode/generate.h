// The decode loop: step, sample, step again, without the interpreter lock in between (design 3.7).
//
// With a drafter, a step verifies the drafted token as a second row. The target's row decides with
// the sampler and the counter of its position, as it would without: a draft is taken if and only if
// it is what was sampled. So the text never depends on drafts (design 3.14).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "cpu/threads.h"
#include "decode/draft.h"
#include "decode/step.h"
#include "decode/token_queue.h"
#include "sample/sampler.h"

namespace moechat {

// One session that is decoding. `token` at `position` is next to go through the layers; the cache
// holds exactly the slots before it.
struct Generation {
  KVCache* cache = nullptr;
  Sampler* sampler = nullptr;
  TokenQueue* queue = nullptr;
  const CancelFlag* cancel = nullptr;
  int32_t token = 0;
  int32_t position = 0;
  int64_t max_tokens = 0;      // still allowed; every sampled token counts
  int64_t context_tokens = 0;  // of prompt and answer together
  std::vector<int32_t> end_ids;
  std::string finish_reason;  // "", "stop", "length", "context", "cancelled", "failed"
  std::optional<Status> failure = std::nullopt;  // why it is "failed"

  Drafter* drafter = nullptr;      // null: no speculation
  KVCache* draft_cache = nullptr;  // for the drafter; may be null
  int32_t draft = -1;              // what the drafter expects after `token`; -1: nothing
  int64_t num_drafted = 0, num_accepted = 0;  // drafts that a step verified, and found right
};

// Steps all generations together until one of them finishes, `interrupt` is raised or `max_steps`
// (0: no limit) are done, but once at least; returns how many were. Generations whose queue is full sit out. When
// DecodeStep::run throws a Status, those that it throws for alone have failed; the others go on as
// if they had never been beside them. All caches are truncated to the tokens before the step, as
// for anything else that is thrown.
int64_t generate(DecodeStep& step, const std::vector<Generation*>& generations, int64_t vocab,
                 const CancelFlag& interrupt, int64_t max_steps);

}  // namespace moechat
