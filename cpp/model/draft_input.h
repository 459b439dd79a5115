// The input of a multi-token-prediction layer (DeepSeek-V3 technical report, section 2.2): for
// position i, with the hidden state h_i of the main model and the token t_{i+1},
//   projection [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)].
// The layer's logits for position i are those of t_{i+2}.
//
// The report leaves two things open, which the public implementations with high acceptance (vLLM
// deepseek_mtp, SGLang deepseek_nextn) settle: the embedding comes first, as the name eh_proj says,
// and h_i is what the main head sees, i.e. after the main model's final norm. The position of the
// rotary embedding is i.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "model/model.h"

namespace moechat {

// joined[2 * hidden] = both normed halves, before the projection. `hidden`: h_i, final norm applied.
void join_draft_input(const InstructionSet& isa, const Model& draft, int32_t next_token,
                      const float* hidden, float* joined);

}  // namespace moechat
