#include "kernels/attention/latent_decode.h"

#include <cstring>

#include "kernels/matmul/product.h"

namespace moechat {

void absorb_query(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                  int64_t head, const float* query, float* latent_query, void* scratch) {
  multiply_transposed(*isa.matmul, weights.key_expand[static_cast<size_t>(head)], 0,
                      dims.kv_lora_rank, Compute::kExact, &query, 1, &latent_query, scratch);
  std::memcpy(latent_query + dims.kv_lora_rank, query + dims.nope_dim,
              static_cast<size_t>(dims.rope_dim) * sizeof(float));
}

void expand_value(const InstructionSet& isa, const ModelDims& dims, const LatentWeights& weights,
                  int64_t head, const float* latent, float* values, void* scratch) {
  multiply(*isa.matmul, weights.value_expand[static_cast<size_t>(head)], 0, dims.v_dim,
           Compute::kExact, &latent, 1, &values, scratch);
}

}  // namespace moechat
