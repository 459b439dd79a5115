#include "decode/generate.h"

#include <algorithm>
#include <thread>

namespace moechat {
namespace {

constexpr auto kReaderPause = std::chrono::milliseconds(1);

// Marks cancelled and full-context generations; true when any has finished.
bool any_finished(const std::vector<Generation*>& generations) {
  bool any = false;
  for (Generation* g : generations) {
    if (g->finish_reason.empty() && g->cancel->raised()) g->finish_reason = "cancelled";
    if (g->finish_reason.empty() && g->position + 1 >= g->context_tokens)
      g->finish_reason = "context";
    any = any || !g->finish_reason.empty();
  }
  return any;
}

void accept(Generation& g, int32_t token) {
  g.sampler->accept(token);
  g.token = token;
  ++g.position;
  --g.max_tokens;
  if (std::find(g.end_ids.begin(), g.end_ids.end(), token) != g.end_ids.end())
    g.finish_reason = "stop";
  else if (g.max_tokens == 0)
    g.finish_reason = "length";
  else if (g.position + 1 >= g.context_tokens)
    g.finish_reason = "context";
  g.queue->push(token);
}

}  // namespace

void generate(DecodeStep& step, const std::vector<Generation*>& generations, int64_t vocab,
              const CancelFlag& interrupt) {
  std::vector<float> logits(generations.size() * static_cast<size_t>(vocab));
  std::vector<Generation*> running;
  std::vector<StepRow> rows;
  while (!any_finished(generations) && !interrupt.raised()) {
    running.clear();
    rows.clear();
    for (Generation* g : generations) {
      if (g->queue->full()) continue;
      float* row_logits = logits.data() + running.size() * static_cast<size_t>(vocab);
      rows.push_back({g->cache, &g->token, 1, g->position, row_logits});
      running.push_back(g);
    }
    if (rows.empty()) {
      std::this_thread::sleep_for(kReaderPause);
      continue;
    }
    bool complete = false;
    try {
      complete = step.run(rows, rows.size() == 1 ? running[0]->cancel : nullptr);
    } catch (...) {
      for (Generation* g : running) g->cache->truncate(g->position);
      throw;
    }
    if (!complete) {
      for (Generation* g : running) g->cache->truncate(g->position);
      continue;
    }
    for (size_t i = 0; i < running.size(); ++i)
      accept(*running[i], running[i]->sampler->sample(logits.data() + i * static_cast<size_t>(vocab),
                                                      static_cast<uint64_t>(running[i]->position) + 1));
  }
}

}  // namespace moechat
