#include "decode/draft.h"

#include <utility>

#include "common/status.h"
#include "sample/philox.h"

namespace moechat {
namespace {

const Model& draft_of(const Model& model) {
  if (model.draft == nullptr)
    throw Status("bad-argument", "the model has no multi-token-prediction layer");
  return *model.draft;
}

}  // namespace

MtpDrafter::MtpDrafter(const Model& model, ThreadPool& pool) : step_(draft_of(model), pool) {}

void MtpDrafter::draft(std::vector<DraftRequest>& requests) {
  const int64_t vocab = step_.model().dims.vocab;
  rows_.clear();
  for (const DraftRequest& request : requests) {
    if (request.cache == nullptr) continue;
    StepRow row;
    row.cache = request.cache;
    row.tokens = request.next_tokens;
    row.num_tokens = request.count;
    row.position = request.position;
    row.previous = request.hidden;
    rows_.push_back(row);
  }
  if (rows_.empty()) return;
  logits_.resize(rows_.size() * static_cast<size_t>(vocab));
  for (size_t i = 0; i < rows_.size(); ++i)
    rows_[i].logits = logits_.data() + i * static_cast<size_t>(vocab);
  bool complete = false;
  try {
    complete = step_.run(rows_, requests.size() == 1 ? requests[0].cancel : nullptr);
  } catch (const Status&) {
    // Weights that give NaN spoil the drafts, not the text.
  }
  size_t i = 0;
  for (DraftRequest& request : requests) {
    if (request.cache == nullptr) continue;
    if (complete)
      request.draft =
          request.sampler->sample(rows_[i++].logits,
                                  static_cast<uint64_t>(request.drafted_position()));
    else
      request.cache->truncate(request.position);
  }
}

ScriptedDrafter::ScriptedDrafter(std::vector<int32_t> script, int32_t first_position,
                                 double hit_rate, uint64_t seed, int64_t vocab)
    : script_(std::move(script)), first_position_(first_position), hit_rate_(hit_rate),
      seed_(seed), vocab_(vocab) {}

void ScriptedDrafter::draft(std::vector<DraftRequest>& requests) {
  for (DraftRequest& request : requests) {
    const int64_t index = request.drafted_position() - first_position_;
    if (index < 0 || index >= static_cast<int64_t>(script_.size())) continue;
    const int32_t token = script_[static_cast<size_t>(index)];
    const bool hit =
        philox_uniform(seed_, static_cast<uint64_t>(request.drafted_position())) <= hit_rate_;
    request.draft = hit ? token : static_cast<int32_t>((token + 1) % vocab_);
  }
}

}  // namespace moechat
