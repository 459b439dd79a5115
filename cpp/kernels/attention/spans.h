// Decode attention over the cache's own slots (flash decoding): the slots are cut into spans, each
// gives a partial softmax, and the spans are joined in order.
//
// Everything here is float32 in both compute modes; only the cache is BF16 in the default one. Spans
// are cut at multiples of kSpanSlots whatever the thread count: the bits of a row depend on that row
// and its session's cache alone (design 3.6).
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "kv/cache.h"
#include "model/model.h"

namespace moechat {

constexpr int64_t kSpanSlots = 4 * kPageSlots;
constexpr int64_t kHeadBlock = kMaxGemvRows;  // heads that share one reading of a page

// The segments of a cache slot that a group of heads reads as its key and as its value; the value is
// the first value_width elements of its segment.
struct SlotSegments {
  int64_t key, value, key_width, value_width;
};

// Latent attention: all heads share the one segment, and the latent is also the value. Grouped
// attention: all keys, then all values, one of each for `heads_per_group` heads.
inline SlotSegments slot_segments(const ModelDims& d, int64_t head) {
  if (d.latent()) return {0, 0, d.kv_width(), d.kv_lora_rank};
  const int64_t kv_head = head / d.heads_per_group();
  return {kv_head, d.num_kv_heads + kv_head, d.head_dim, d.head_dim};
}

// Elements that attention sums up for a head: the latent, or the value itself.
inline int64_t attended_width(const ModelDims& d) { return d.latent() ? d.kv_lora_rank : d.head_dim; }

// Scratch floats of attend_span.
inline int64_t attend_span_floats(const ModelDims& d) {
  return kHeadBlock * (kSpanSlots + attended_width(d));
}

// Attention of `heads` <= kHeadBlock queries (rows of key_width) to slots [begin, end) of one layer,
// all within one span. out[heads][value_width]: unnormalised sums; max[heads], sum[heads]: of the
// exponentials.
void attend_span(const InstructionSet& isa, const ModelDims& dims, const KVCache& cache,
                 int64_t layer, int64_t begin, int64_t end, const SlotSegments& segments,
                 const float* queries, int64_t heads, float* out, float* max, float* sum,
                 float* float_scratch, void* scratch);

// Joins `spans` partial results of one head (strides in floats between spans) into result[width].
// `sink` (or null) is one more logit, with no value.
void join_spans(const InstructionSet& isa, int64_t spans, int64_t width, const float* out,
                int64_t out_stride, const float* max, const float* sum, int64_t stat_stride,
                const float* sink, float* result);

}  // namespace moechat
