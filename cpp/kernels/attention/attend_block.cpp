#include "kernels/attention/attend_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moechat {
namespace {

constexpr int64_t kTaskFlops = 80'000'000;  // about the work of one block
constexpr float kMasked = -std::numeric_limits<float>::infinity();

void scale_scores(const InstructionSet& isa, const ModelDims& dims, float* scores, int64_t n) {
  isa.vector->scale(scores, dims.softmax_scale, n);
  if (dims.attention_softcap > 0) isa.vector->softcap(scores, dims.attention_softcap, n);
}

int64_t first_visible(const QueryBlock& block, int64_t i) {
  return block.visible_begin != nullptr ? block.visible_begin[i] : 0;
}

}  // namespace

int64_t queries_per_block(int64_t num_keys, int64_t key_width, int64_t value_width) {
  const int64_t query_flops = 2 * num_keys * (key_width + value_width);
  return std::clamp<int64_t>(kTaskFlops / query_flops / 16 * 16, 16, kMaxQueries);
}

void attend_block(const InstructionSet& isa, const ModelDims& dims, const MatrixView& keys,
                  const MatrixView& values, const QueryBlock& block, const float* sink, float* y,
                  int64_t y_stride, float* float_scratch, void* scratch) {
  const int64_t value_width = values.cols, count = block.count;
  float* scores = float_scratch;                       // [kMaxQueries][kKeyBlock]
  float* block_out = scores + kMaxQueries * kKeyBlock;  // [kMaxQueries][value_width]
  float* out = block_out + kMaxQueries * value_width;   // [kMaxQueries][value_width]
  float max[kMaxQueries], sum[kMaxQueries];
  const float* queries[kMaxQueries];
  const float* probabilities[kMaxQueries];
  float* score_rows[kMaxQueries];
  float* block_rows[kMaxQueries];
  for (int64_t i = 0; i < count; ++i) {
    queries[i] = block.data + i * block.stride;
    score_rows[i] = scores + i * kKeyBlock;
    probabilities[i] = score_rows[i];
    block_rows[i] = block_out + i * value_width;
    max[i] = sink != nullptr ? *sink : kMasked;
    sum[i] = sink != nullptr ? 1.0f : 0.0f;
  }
  std::memset(out, 0, static_cast<size_t>(count * value_width) * sizeof(float));
  const int64_t last_key = block.first_slot + count;  // exclusive: the last query sees itself
  for (int64_t key = first_visible(block, 0) / kKeyBlock * kKeyBlock; key < last_key;
       key += kKeyBlock) {
    const int64_t width = std::min(kKeyBlock, last_key - key);
    isa.matmul->gemm(keys.row_slice(key, width), 0, width, Compute::kExact, queries, count,
                     score_rows, scratch);
    for (int64_t i = 0; i < count; ++i) {
      float* row = score_rows[i];
      const int64_t begin = std::clamp<int64_t>(first_visible(block, i) - key, 0, width);
      const int64_t end = std::clamp<int64_t>(block.first_slot + i + 1 - key, begin, width);
      std::fill(row, row + begin, 0.0f);
      std::fill(row + end, row + width, 0.0f);
      if (begin == end) continue;
      scale_scores(isa, dims, row + begin, end - begin);
      const float best = std::max(max[i], isa.vector->max(row + begin, end - begin));
      const float rescale = std::exp(max[i] - best);
      sum[i] = sum[i] * rescale + isa.vector->exp_sum(row + begin, best, end - begin);
      isa.vector->scale(out + i * value_width, rescale, value_width);
      max[i] = best;
    }
    isa.matmul->gemv_transposed(values.row_slice(key, width), 0, value_width, Compute::kExact,
                                probabilities, count, block_rows, scratch);
    isa.vector->axpy(1.0f, block_out, count * value_width, out);
  }
  for (int64_t i = 0; i < count; ++i) {
    float* row = y + i * y_stride;
    std::memcpy(row, out + i * value_width, static_cast<size_t>(value_width) * sizeof(float));
    isa.vector->scale(row, 1.0f / sum[i], value_width);
  }
}

void add_window_mass(const InstructionSet& isa, const ModelDims& dims, const MatrixView& keys,
                     const QueryBlock& block, const float* sink, float* mass, float* float_scratch,
                     void* scratch) {
  for (int64_t begin = 0; begin < block.count; begin += kMaxGemvRows) {
    const int64_t count = std::min<int64_t>(kMaxGemvRows, block.count - begin);
    const int64_t first = first_visible(block, begin), last = block.first_slot + begin + count;
    const float* queries[kMaxGemvRows];
    float* rows[kMaxGemvRows];
    for (int64_t i = 0; i < count; ++i) {
      queries[i] = block.data + (begin + i) * block.stride;
      rows[i] = float_scratch + i * keys.rows;
    }
    isa.matmul->gemv(keys, first, last, Compute::kExact, queries, static_cast<int>(count), rows,
                     scratch, nullptr);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = first_visible(block, begin + i);
      const int64_t n = block.first_slot + begin + i + 1 - from;
      float* row = rows[i] + from;
      scale_scores(isa, dims, row, n);
      float best = isa.vector->max(row, n);
      if (sink != nullptr) best = std::max(best, *sink);
      float sum = isa.vector->exp_sum(row, best, n);
      if (sink != nullptr) sum += std::exp(*sink - best);
      isa.vector->axpy(1.0f / sum, row, n, mass + from);
    }
  }
}

}  // namespace moechat
