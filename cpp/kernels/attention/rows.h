// What happens to one token's projected rows before attention: biases, norms, rotation. Prefill and
// decode call the same functions, so that a cache slot does not depend on who made it.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "model/model.h"

namespace moechat {

// slot[kv_width]: the latent is normed, the shared key rotated. cos_sin: of the layer's rope.
void finish_latent_slot(const InstructionSet& isa, const ModelDims& dims, const Rope& rope,
                        const LatentWeights& weights, const float* cos_sin, float* slot);

// query[num_heads][query_dim]: the last rope_dim elements of every head are rotated.
void finish_latent_query(const ModelDims& dims, const Rope& rope, const float* cos_sin,
                         float* query);

// query[num_heads][head_dim] and slot = keys, then values [num_kv_heads][head_dim], as the
// projections left them: biases, norms, clipping, rotation of q and k.
void finish_grouped_rows(const InstructionSet& isa, const ModelDims& dims, const Rope& rope,
                         const GroupedWeights& weights, const float* cos_sin, float* query,
                         float* slot);

// x += bias, unless there is none.
void add_bias(const InstructionSet& isa, const std::vector<float>& bias, float* x);

}  // namespace moechat
