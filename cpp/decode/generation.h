// One session's answer under way: what samples its tokens, where they go, and when it ends. A step
// may run anywhere; what follows from its logits is here.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "cpu/threads.h"
#include "decode/draft.h"
#include "decode/token_queue.h"
#include "kv/cache.h"
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

// Before a step: marks a generation as "cancelled" or at the end of its "context". True while it goes
// on.
bool goes_on(Generation& g);

bool is_end(const Generation& g, int32_t token);

// Samples the token behind `position` from logits [vocab], which are finite, and hands it on; marks
// the generation as finished by it. Call with room in the queue.
int32_t sample_next(Generation& g, const float* logits);

void fail(Generation& g, const Status& why);

// After a step of one token that ran elsewhere, whose KV the cache may or may not hold already:
// sample_next(); or, when the logits or what left `first_bad_layer` (-1: nothing) are not finite,
// fail() as a step that throws does, the cache truncated to the tokens before. True while the
// generation goes on.
bool advance(Generation& g, const float* logits, int64_t vocab, int64_t first_bad_layer);

}  // namespace moechat
