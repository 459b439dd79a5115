// Absorbed multi-head latent attention for decode (DeepSeek-V2 paper, section 2.1.2; "absorb" of
// the reference implementation): queries are moved into the latent space, so that all heads attend
// to the cache's latents themselves and kv_b_proj is never expanded. Float32 in both compute modes:
// so the absorbed and the un-absorbed form compute the same function of the cache.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "model/model.h"

namespace moechat {

// Rows r in [0, rows) of head `head`, at most kMaxGemvRows; its weights are decoded once for all:
// query[r * stride] [nope_dim + rope_dim], the latter rotated -> latent_query[r * stride]
// [kv_width].
void absorb_queries(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                    int64_t head, int64_t rows, const float* query, int64_t query_stride,
                    float* latent_query, int64_t latent_stride, void* scratch);

// Likewise latent[r * kv_lora_rank] that head `head` attended to -> values[r * stride] [v_dim].
void expand_values(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                   int64_t head, int64_t rows, const float* latent, float* values,
                   int64_t values_stride, void* scratch);

}  // namespace moechat
