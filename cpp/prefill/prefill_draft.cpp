// A finished span's way through the draft layer.
#include <algorithm>
#include <utility>

#include "model/draft_input.h"
#include "prefill/prefill.h"

namespace moechat {
namespace {

constexpr int64_t kJoinedRows = 512;  // inputs of the projection at a time

}  // namespace

std::unique_ptr<Prefill> Prefill::draft(const KVCache& cache, int32_t next_token,
                                        const CancelFlag* cancel) {
  const ModelDims& d = model_.dims;
  std::vector<int32_t> tokens(tokens_.begin() + 1, tokens_.end());
  if (next_token >= 0) tokens.push_back(next_token);
  spent_ = true;
  if (tokens.empty()) return nullptr;
  Job job;
  job.cancel = cancel;
  add_rows(job, "draft", [this, &d](int64_t r) {
    float* row = x_.data() + r * d.hidden;
    isa_.vector->rms_norm(row, model_.final_norm.data(), d.rms_eps, d.hidden, row);
  });
  if (!pool_.run(Priority::kPrefill, job)) return nullptr;
  for (std::vector<float>* buffer : {&normed_, &branch_, &query_, &values_, &slots_, &head_mass_})
    std::vector<float>().swap(*buffer);
  latent_.reset();
  grouped_.reset();
  const std::vector<float> hidden = std::move(x_);
  std::unique_ptr<Prefill> draft(new Prefill(*model_.draft, pool_, cache, std::move(tokens),
                                             first_position_));
  return draft->join_draft_inputs(hidden, cancel) ? std::move(draft) : nullptr;
}

// x_ = the projected inputs, from the main model's hidden states [>= num_tokens][hidden].
bool Prefill::join_draft_inputs(const std::vector<float>& hidden, const CancelFlag* cancel) {
  const int64_t width = model_.dims.hidden;
  std::vector<float> joined(
      static_cast<size_t>(std::min(kJoinedRows, num_tokens()) * 2 * width));
  for (int64_t first = 0; first < num_tokens(); first += kJoinedRows) {
    const int64_t rows = std::min(kJoinedRows, num_tokens() - first);
    Job job;
    job.cancel = cancel;
    job.phases.push_back({[rows] { return rows; },
                          [&, this](int64_t r, int) {
                            join_draft_input(isa_, model_,
                                             tokens_[static_cast<size_t>(first + r)],
                                             hidden.data() + (first + r) * width,
                                             joined.data() + r * 2 * width);
                          }});
    add_product(job, "draft", model_.input.projection, model_.compute, rows, joined.data(),
                x_.data() + first * width, width);
    if (!pool_.run(Priority::kPrefill, job)) return false;
  }
  return true;
}

}  // namespace moechat
