#include "kernels/attention/latent_decode.h"

#include <cstring>

#include "kernels/matmul/product.h"

namespace moechat {

void absorb_queries(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                    int64_t head, int64_t rows, const float* query, int64_t query_stride,
                    float* latent_query, int64_t latent_stride, void* scratch) {
  const float* x[kMaxGemvRows];
  float* y[kMaxGemvRows];
  for (int64_t r = 0; r < rows; ++r) {
    x[r] = query + r * query_stride;
    y[r] = latent_query + r * latent_stride;
    std::memcpy(y[r] + dims.kv_lora_rank, x[r] + dims.nope_dim,
                static_cast<size_t>(dims.rope_dim) * sizeof(float));
  }
  const MatrixView& w = weights.key_expand[static_cast<size_t>(head)];
  // Stored transposed it takes the prefill class of products, where rows are not independent.
  const int64_t at_once = w.transposed ? 1 : rows;
  for (int64_t r = 0; r < rows; r += at_once)
    multiply_transposed(*isa.matmul, w, 0, dims.kv_lora_rank, Compute::kExact, x + r, at_once,
                        y + r, scratch);
}

void expand_values(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                   int64_t head, int64_t rows, const float* latent, float* values,
                   int64_t values_stride, void* scratch) {
  const float* x[kMaxGemvRows];
  float* y[kMaxGemvRows];
  for (int64_t r = 0; r < rows; ++r) {
    x[r] = latent + r * dims.kv_lora_rank;
    y[r] = values + r * values_stride;
  }
  multiply(*isa.matmul, weights.value_expand[static_cast<size_t>(head)], 0, dims.v_dim,
           Compute::kExact, x, rows, y, scratch);
}

}  // namespace moechat
