// Causal attention of a block of queries of one head for prefill: scores are blocked with a running
// softmax, so that memory is linear in the length and no score matrix is ever stored. Float32 in
// both compute modes.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "model/model.h"

namespace moechat {

constexpr int64_t kMaxQueries = 128;  // queries of one block, at most
constexpr int64_t kKeyBlock = 128;    // keys between two updates of the running softmax

// Queries of consecutive tokens: row i stands at data + i * stride and is the query of slot
// first_slot + i, which sees the slots [visible_begin[i], first_slot + i] (null: from slot 0 on).
struct QueryBlock {
  const float* data;
  int64_t stride, count, first_slot;
  const int64_t* visible_begin;
};

inline int64_t attend_block_floats(int64_t value_width) {
  return kMaxQueries * (kKeyBlock + 2 * value_width);
}
inline int64_t window_mass_floats(int64_t num_keys) { return kMaxGemvRows * num_keys; }

// y[i * y_stride ...] = softmax(cap(scale q k)) v for block.count <= kMaxQueries queries. keys,
// values: F32, a row for each slot. `sink` (or null): one more logit, with no value.
void attend_block(const InstructionSet& isa, const ModelDims& dims, const MatrixView& keys,
                  const MatrixView& values, const QueryBlock& block, const float* sink, float* y,
                  int64_t y_stride, float* float_scratch, void* scratch);

// mass[slot] += the probability that each query of the block gives to the slot; any block.count.
void add_window_mass(const InstructionSet& isa, const ModelDims& dims, const MatrixView& keys,
                     const QueryBlock& block, const float* sink, float* mass, float* float_scratch,
                     void* scratch);

// How many queries a block has, by the shape alone: many share one packing of the keys, few keep a
// task short.
int64_t queries_per_block(int64_t num_keys, int64_t key_width, int64_t value_width);

}  // namespace moechat
