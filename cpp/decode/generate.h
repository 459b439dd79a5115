// The decode loop: step, sample, step again, without the interpreter lock in between (design 3.7).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/threads.h"
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
  std::string finish_reason;  // "", "stop", "length", "context", "cancelled"
};

// Steps all generations together until one of them finishes or `interrupt` is raised. Generations
// whose queue is full sit out. Throws what DecodeStep::run throws, caches truncated to the tokens
// before the failed step.
void generate(DecodeStep& step, const std::vector<Generation*>& generations, int64_t vocab,
              const CancelFlag& interrupt);

}  // namespace moechat
