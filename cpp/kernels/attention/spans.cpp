#include "kernels/attention/spans.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moechat {

void attend_span(const InstructionSet& isa, const ModelDims& dims, const KVCache& cache,
                 int64_t layer, int64_t begin, int64_t end, const SlotSegments& segments,
                 const float* queries, int64_t heads, float* out, float* max, float* sum,
                 float* float_scratch, void* scratch) {
  const int64_t width = segments.value_width, slots = end - begin;
  float* scores = float_scratch;                         // [kHeadBlock][kSpanSlots]
  float* page_out = scores + kHeadBlock * kSpanSlots;    // [kHeadBlock][width]
  const float* rows[kHeadBlock];
  float* outputs[kHeadBlock];
  for (int64_t h = 0; h < heads; ++h) rows[h] = queries + h * segments.key_width;
  const auto in_page = [end](int64_t slot) {
    return std::min(end, (slot / kPageSlots + 1) * kPageSlots) - slot;
  };
  for (int64_t slot = begin, count; slot < end; slot += count) {
    count = in_page(slot);
    for (int64_t h = 0; h < heads; ++h) outputs[h] = scores + h * kSpanSlots + (slot - begin);
    const MatrixView keys = cache.segment_view(layer, segments.key, slot, count);
    isa.matmul->gemv(keys, 0, count, Compute::kExact, rows, static_cast<int>(heads), outputs,
                     scratch, nullptr);
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* row = scores + h * kSpanSlots;
    isa.vector->scale(row, dims.softmax_scale, slots);
    if (dims.attention_softcap > 0) isa.vector->softcap(row, dims.attention_softcap, slots);
    max[h] = isa.vector->max(row, slots);
    sum[h] = isa.vector->exp_sum(row, max[h], slots);
    std::memset(out + h * width, 0, static_cast<size_t>(width) * sizeof(float));
    outputs[h] = page_out + h * width;
  }
  for (int64_t slot = begin, count; slot < end; slot += count) {
    count = in_page(slot);
    const MatrixView values =
        cache.segment_view(layer, segments.value, slot, count).col_slice(0, width);
    for (int64_t h = 0; h < heads; ++h) rows[h] = scores + h * kSpanSlots + (slot - begin);
    isa.matmul->gemv_transposed(values, 0, width, Compute::kExact, rows, heads, outputs, scratch);
    isa.vector->axpy(1.0f, page_out, heads * width, out);
  }
}

void join_spans(const InstructionSet& isa, int64_t spans, int64_t width, const float* out,
                int64_t out_stride, const float* max, const float* sum, int64_t stat_stride,
                const float* sink, float* result) {
  float best = max[0];
  for (int64_t s = 1; s < spans; ++s) best = std::max(best, max[s * stat_stride]);
  if (sink != nullptr) best = std::max(best, *sink);
  std::memset(result, 0, static_cast<size_t>(width) * sizeof(float));
  float total = sink != nullptr ? std::exp(*sink - best) : 0.0f;
  for (int64_t s = 0; s < spans; ++s) {
    const float weight = std::exp(max[s * stat_stride] - best);
    total += weight * sum[s * stat_stride];
    isa.vector->axpy(weight, out + s * out_stride, width, result);
  }
  isa.vector->scale(result, 1.0f / total, width);
}

}  // namespace moechat
