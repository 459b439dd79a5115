#include "decode/generate.h"

#include <algorithm>
#include <thread>

namespace moechat {
namespace {

constexpr auto kReaderPause = std::chrono::milliseconds(1);
constexpr int64_t kMaxRow = 2;  // tokens of one generation in a step: its own and a draft

// What one generation takes to a step and gets from it.
struct Turn {
  Generation* generation;
  int32_t tokens[kMaxRow];  // to step; then those that follow them, as far as they are certain
  int64_t num_tokens;
  int32_t position;
  float* logits;  // [kMaxRow][vocab]
  float* hidden;  // [kMaxRow][hidden]
};

// Marks those that have finished; true when there are any.
bool any_finished(const std::vector<Generation*>& generations) {
  bool any = false;
  for (Generation* g : generations) any = !goes_on(*g) || any;
  return any;
}

// Whether the answer may go on behind the next token.
bool has_room_for_two(const Generation& g) {
  return g.max_tokens >= 2 && g.position + 2 < g.context_tokens;
}

Turn begin_turn(Generation& g, float* logits, float* hidden) {
  // Nothing follows an end token, so there is nothing to gain by a row for it.
  const bool verify = g.draft >= 0 && has_room_for_two(g) && g.queue->room() >= kMaxRow &&
                      !is_end(g, g.draft);
  return {&g, {g.token, g.draft}, verify ? 2 : 1, g.position, logits, hidden};
}

// Samples the token after the step's own, and when it is the draft, the one after that, too.
void end_turn(Turn& turn, int64_t vocab) {
  Generation& g = *turn.generation;
  int64_t certain = 0;
  bool confirmed = true;
  while (confirmed && certain < turn.num_tokens && g.finish_reason.empty()) {
    const float* logits = turn.logits + certain * vocab;
    const int32_t token = sample_next(g, logits);
    confirmed = certain + 1 < turn.num_tokens && token == turn.tokens[certain + 1];
    turn.tokens[certain++] = token;
    g.num_accepted += confirmed;
  }
  g.num_drafted += turn.num_tokens - 1;
  g.draft = -1;
  if (certain < turn.num_tokens) g.cache->truncate(g.position);
  turn.num_tokens = certain;
}

// False when there was no draft in the step.
bool drop_drafts(const std::vector<Turn>& turns) {
  bool any = false;
  for (const Turn& turn : turns) {
    any = any || turn.num_tokens > 1;
    turn.generation->draft = -1;
  }
  return any;
}

// After a step that threw, caches truncated: finds whose rows it throws for alone.
void find_failed(DecodeStep& step, const std::vector<Turn>& turns, const std::vector<StepRow>& rows,
                 const Status& failure) {
  bool found = false;
  for (size_t i = 0; i < turns.size(); ++i) {
    Generation& g = *turns[i].generation;
    try {
      if (turns.size() == 1) throw Status(failure);
      step.run({rows[i]}, g.cancel);
    } catch (const Status& own) {
      fail(g, own);
      found = true;
    }
    g.cache->truncate(turns[i].position);
  }
  if (!found) throw Status(failure);
}

// Asks each drafter once for all its generations that go on.
void draft(std::vector<Turn>& turns, std::vector<DraftRequest>& requests) {
  const auto wants = [](const Generation& g) {
    return g.drafter != nullptr && g.finish_reason.empty() && has_room_for_two(g);
  };
  for (size_t first = 0; first < turns.size(); ++first) {
    Drafter* drafter = turns[first].generation->drafter;
    const auto same = [drafter](const Turn& turn) { return turn.generation->drafter == drafter; };
    if (drafter == nullptr ||
        std::any_of(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(first), same))
      continue;
    requests.clear();
    for (const Turn& turn : turns) {
      const Generation& g = *turn.generation;
      if (same(turn) && wants(g))
        requests.push_back({g.draft_cache, g.sampler, g.cancel, turn.hidden, turn.tokens,
                            turn.num_tokens, turn.position, -1});
    }
    if (requests.empty()) continue;
    drafter->draft(requests);
    size_t next = 0;
    for (const Turn& turn : turns)
      if (same(turn) && wants(*turn.generation)) turn.generation->draft = requests[next++].draft;
  }
}

}  // namespace

int64_t generate(DecodeStep& step, const std::vector<Generation*>& generations, int64_t vocab,
                 const CancelFlag& interrupt, int64_t max_steps) {
  const int64_t width = step.model().dims.hidden;
  std::vector<float> logits(generations.size() * static_cast<size_t>(kMaxRow * vocab));
  std::vector<float> hidden(generations.size() * static_cast<size_t>(kMaxRow * width));
  std::vector<Turn> turns;
  std::vector<StepRow> rows;
  std::vector<DraftRequest> requests;
  const auto take_back = [&turns] {
    for (const Turn& turn : turns) turn.generation->cache->truncate(turn.position);
  };
  int64_t num_steps = 0;
  const auto may_step = [&] {
    return !any_finished(generations) && (num_steps == 0 || !interrupt.raised()) &&
           (max_steps == 0 || num_steps < max_steps);
  };
  while (may_step()) {
    turns.clear();
    rows.clear();
    for (Generation* g : generations) {
      if (g->queue->room() == 0) continue;
      const auto place = static_cast<int64_t>(turns.size()) * kMaxRow;
      turns.push_back(
          begin_turn(*g, logits.data() + place * vocab, hidden.data() + place * width));
    }
    if (turns.empty()) {
      std::this_thread::sleep_for(kReaderPause);
      if (max_steps != 0 || interrupt.raised()) break;  // the caller has other work meanwhile
      continue;
    }
    for (const Turn& turn : turns)
      rows.push_back({turn.generation->cache, turn.tokens, turn.num_tokens, turn.position,
                      turn.logits, turn.num_tokens,
                      turn.generation->drafter != nullptr ? turn.hidden : nullptr, nullptr});
    bool complete = false;
    try {
      complete = step.run(rows, rows.size() == 1 ? turns[0].generation->cancel : nullptr);
    } catch (const Status& failure) {
      take_back();
      // Without drafts first: the text must not depend on what a wrong one gives.
      if (!drop_drafts(turns)) find_failed(step, turns, rows, failure);
      continue;
    } catch (...) {
      take_back();
      throw;
    }
    if (!complete) {
      take_back();
      continue;
    }
    for (Turn& turn : turns) end_turn(turn, vocab);
    draft(turns, requests);
    ++num_steps;
  }
  return num_steps;
}

}  // namespace moechat
