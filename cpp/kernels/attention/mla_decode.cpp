#include "kernels/attention/mla_decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moechat {

void absorb_query(const InstructionSet& isa, const ModelDims& dims, const MatrixView& kv_b,
                  int64_t head, const float* query, float* latent_query, void* scratch) {
  const MatrixView key_rows = kv_b.row_slice(head * (dims.nope_dim + dims.v_dim), dims.nope_dim);
  isa.matmul->gemv_transposed(key_rows, 0, dims.kv_lora_rank, Compute::kExact, &query, 1, &latent_query,
                              scratch);
  std::memcpy(latent_query + dims.kv_lora_rank, query + dims.nope_dim,
              static_cast<size_t>(dims.rope_dim) * sizeof(float));
}

void attend_span(const InstructionSet& isa, const ModelDims& dims, const KVCache& cache,
                 int64_t layer, int64_t begin, int64_t end, const float* latent_queries,
                 int64_t heads, float* out, float* max, float* sum, float* float_scratch,
                 void* scratch) {
  const int64_t rank = dims.kv_lora_rank, width = dims.kv_width(), slots = end - begin;
  float* scores = float_scratch;                         // [kHeadBlock][kSpanSlots]
  float* page_out = scores + kHeadBlock * kSpanSlots;    // [kHeadBlock][rank]
  const float* rows[kHeadBlock];
  float* outputs[kHeadBlock];
  for (int64_t h = 0; h < heads; ++h) rows[h] = latent_queries + h * width;
  for (int64_t slot = begin; slot < end; slot += kPageSlots) {
    const int64_t count = std::min(kPageSlots, end - slot);
    for (int64_t h = 0; h < heads; ++h) outputs[h] = scores + h * kSpanSlots + (slot - begin);
    isa.matmul->gemv(cache.page_view(layer, slot / kPageSlots, count), 0, count, Compute::kExact, rows,
                     static_cast<int>(heads), outputs, scratch);
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* row = scores + h * kSpanSlots;
    isa.vector->scale(row, dims.softmax_scale, slots);
    max[h] = isa.vector->max(row, slots);
    sum[h] = isa.vector->exp_sum(row, max[h], slots);
    std::memset(out + h * rank, 0, static_cast<size_t>(rank) * sizeof(float));
    outputs[h] = page_out + h * rank;
  }
  for (int64_t slot = begin; slot < end; slot += kPageSlots) {
    const int64_t count = std::min(kPageSlots, end - slot);
    const MatrixView latents =
        cache.page_view(layer, slot / kPageSlots, count).col_slice(0, rank);
    for (int64_t h = 0; h < heads; ++h) rows[h] = scores + h * kSpanSlots + (slot - begin);
    isa.matmul->gemv_transposed(latents, 0, rank, Compute::kExact, rows, heads, outputs, scratch);
    isa.vector->axpy(1.0f, page_out, heads * rank, out);
  }
}

void join_spans(const InstructionSet& isa, const ModelDims& dims, const MatrixView& kv_b,
                int64_t head, int64_t spans, const float* out, int64_t out_stride,
                const float* max, const float* sum, int64_t stat_stride, float* values,
                float* latent, void* scratch) {
  const int64_t rank = dims.kv_lora_rank;
  float best = max[0];
  for (int64_t s = 1; s < spans; ++s) best = std::max(best, max[s * stat_stride]);
  std::memset(latent, 0, static_cast<size_t>(rank) * sizeof(float));
  float total = 0;
  for (int64_t s = 0; s < spans; ++s) {
    const float weight = std::exp(max[s * stat_stride] - best);
    total += weight * sum[s * stat_stride];
    isa.vector->axpy(weight, out + s * out_stride, rank, latent);
  }
  isa.vector->scale(latent, 1.0f / total, rank);
  const MatrixView value_rows =
      kv_b.row_slice(head * (dims.nope_dim + dims.v_dim) + dims.nope_dim, dims.v_dim);
  const float* x = latent;
  isa.matmul->gemv(value_rows, 0, dims.v_dim, Compute::kExact, &x, 1, &values, scratch);
}

}  // namespace moechat
