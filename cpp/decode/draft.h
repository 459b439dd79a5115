// Drafters guess the token after the next one, so that the next step can verify it as a second row.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/threads.h"
#include "decode/step.h"
#include "kv/cache.h"
#include "sample/sampler.h"

namespace moechat {

// One session whose next step may verify a draft. Its tokens up to position + count are certain.
struct DraftRequest {
  KVCache* cache = nullptr;  // of the draft layer; null: the session has none
  Sampler* sampler = nullptr;
  const CancelFlag* cancel = nullptr;
  const float* hidden = nullptr;         // [count][hidden], of the main model after its final norm
  const int32_t* next_tokens = nullptr;  // [count]: the token after each of these positions
  int64_t count = 0;
  int32_t position = 0;  // of the first hidden state
  int32_t draft = -1;    // to be set: the token for position + count + 1; -1 for none

  int32_t drafted_position() const { return position + static_cast<int32_t>(count) + 1; }
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Sets `draft` of every request. May leave any of them out: a draft only saves time.
  virtual void draft(std::vector<DraftRequest>& requests) = 0;
  // Whether its drafts are tokens of `model`, and hidden states of it are what it takes.
  virtual bool serves(const Model& model) const = 0;
};

// The model's multi-token-prediction layer. One for all sessions of the decode thread.
class MtpDrafter : public Drafter {
 public:
  // Throws Status "bad-argument" when the model has no such layer.
  MtpDrafter(const Model& model, ThreadPool& pool);
  // All requests in one step of the layer. Their caches take one slot a hidden state. The draft is
  // sampled as the target will be: with the request's sampler and the counter of its position, so
  // that close distributions often choose the same token at any temperature.
  void draft(std::vector<DraftRequest>& requests) override;
  bool serves(const Model& model) const override { return &step_.model() == model.draft.get(); }
  // Of the last request of the last call: [vocab]. For tests.
  const std::vector<float>& logits() const { return logits_; }

 private:
  DecodeStep step_;
  std::vector<StepRow> rows_;
  std::vector<float> logits_;  // [requests with a cache][vocab]
};

// For measurements: knows the text that will come, and hits with a given rate. Whether a position
// hits depends on the seed and the position alone.
class ScriptedDrafter : public Drafter {
 public:
  // script[i] will stand at first_position + i; every id in [0, vocab), vocab > 1.
  ScriptedDrafter(std::vector<int32_t> script, int32_t first_position, double hit_rate,
                  uint64_t seed, int64_t vocab);
  void draft(std::vector<DraftRequest>& requests) override;
  bool serves(const Model& model) const override { return model.dims.vocab == vocab_; }

 private:
  std::vector<int32_t> script_;
  int64_t first_position_;
  double hit_rate_;
  uint64_t seed_;
  int64_t vocab_;
};

}  // namespace moechat
