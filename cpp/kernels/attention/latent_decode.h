// Absorbed multi-head latent attention for decode (DeepSeek-V2 paper, section 2.1.2; "absorb" of
// the reference implementation): queries are moved into the latent space, so that all heads attend
// to the cache's latents themselves and kv_b_proj is never expanded. Float32 in both compute modes:
// so the absorbed and the un-absorbed form compute the same function of the cache.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "model/model.h"

namespace moechat {

// query[nope_dim + rope_dim] of head `head`, rope part rotated -> latent_query[kv_width].
void absorb_query(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                  int64_t head, const float* query, float* latent_query, void* scratch);

// latent[kv_lora_rank] that head `head` attended to -> values[v_dim].
void expand_value(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                  int64_t head, const float* latent, float* values, void* scratch);

}  // namespace moechat
