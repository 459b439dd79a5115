// Absorbed multi-head latent attention for decode (DeepSeek-V2 paper, section 2.1.2; "absorb" of
// the reference implementation): queries are moved into the latent space, so that all heads attend
// to the cache's latents themselves and kv_b_proj is never expanded.
//
// Everything here is float32 in both compute modes; only the cache is BF16 in the default one. So the
// absorbed and the un-absorbed form compute the same function of the cache.
//
// Shapes: width = kv_lora_rank + rope_dim, one cache slot and one latent query.
// The slots are cut into spans of kSpanSlots from slot 0 on, whatever the thread count, and joined
// in order: the bits of a row depend on that row and its session's cache alone (design 3.6).
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "kv/cache.h"
#include "model/model.h"

namespace moechat {

constexpr int64_t kSpanSlots = 4 * kPageSlots;
constexpr int64_t kHeadBlock = kMaxGemvRows;  // heads that share one reading of a page

// Scratch floats of attend_span.
inline int64_t attend_span_floats(const ModelDims& dims) {
  return kHeadBlock * (kSpanSlots + dims.kv_lora_rank);
}

// query[nope_dim + rope_dim] of head `head`, rope part rotated -> latent_query[width].
void absorb_query(const InstructionSet& isa, const ModelDims& dims, const MatrixView& kv_b,
                  int64_t head, const float* query, float* latent_query, void* scratch);

// Attention of `heads` <= kHeadBlock latent queries (rows of width) to slots [begin, end) of one
// layer. out[heads][kv_lora_rank]: unnormalised sums; max[heads], sum[heads]: of the exponentials.
void attend_span(const InstructionSet& isa, const ModelDims& dims, const KVCache& cache,
                 int64_t layer, int64_t begin, int64_t end, const float* latent_queries,
                 int64_t heads, float* out, float* max, float* sum, float* float_scratch,
                 void* scratch);

// Joins `spans` partial results of one head (strides in floats between spans) and expands the
// latent to values[v_dim]. `latent` is scratch of kv_lora_rank floats.
void join_spans(const InstructionSet& isa, const ModelDims& dims, const MatrixView& kv_b,
                int64_t head, int64_t spans, const float* out, int64_t out_stride,
                const float* max, const float* sum, int64_t stat_stride, float* values,
                float* latent, void* scratch);

}  // namespace moechat
