#include "model/draft_input.h"

namespace moechat {

void join_draft_input(const InstructionSet& isa, const Model& draft, int32_t next_token,
                      const float* hidden, float* joined) {
  const ModelDims& d = draft.dims;
  embed(draft, next_token, joined);
  isa.vector->rms_norm(joined, draft.input.token_norm.data(), d.rms_eps, d.hidden, joined);
  isa.vector->rms_norm(hidden, draft.input.hidden_norm.data(), d.rms_eps, d.hidden,
                       joined + d.hidden);
}

}  // namespace moechat
