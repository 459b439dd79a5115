#include "decode/generation.h"

#include <algorithm>

#include "model/model.h"

namespace moechat {

bool goes_on(Generation& g) {
  if (g.finish_reason.empty() && g.cancel->raised()) g.finish_reason = "cancelled";
  if (g.finish_reason.empty() && g.position + 1 >= g.context_tokens) g.finish_reason = "context";
  return g.finish_reason.empty();
}

bool is_end(const Generation& g, int32_t token) {
  return std::find(g.end_ids.begin(), g.end_ids.end(), token) != g.end_ids.end();
}

int32_t sample_next(Generation& g, const float* logits) {
  const int32_t token = g.sampler->sample(logits, static_cast<uint64_t>(g.position) + 1);
  g.sampler->accept(token);
  g.token = token;
  ++g.position;
  --g.max_tokens;
  if (is_end(g, token))
    g.finish_reason = "stop";
  else if (g.max_tokens == 0)
    g.finish_reason = "length";
  else if (g.position + 1 >= g.context_tokens)
    g.finish_reason = "context";
  g.queue->push(token);
  return token;
}

void fail(Generation& g, const Status& why) {
  g.finish_reason = "failed";
  g.failure = why;
}

bool advance(Generation& g, const float* logits, int64_t vocab, int64_t first_bad_layer) {
  g.draft = -1;
  try {
    if (first_bad_layer >= 0 || !all_finite(logits, vocab)) throw_non_finite(first_bad_layer);
  } catch (const Status& failure) {
    fail(g, failure);
    g.cache->truncate(g.position);
    return false;
  }
  sample_next(g, logits);
  return g.finish_reason.empty();
}

}  // namespace moechat
