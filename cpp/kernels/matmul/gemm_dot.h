// gemm with vdpbf16ps. It is apart because not every CPU that has the instruction gains from it.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {
namespace matmul_avx512bf16 {

// Whether vdpbf16ps does more multiplications a cycle than float32 FMA. It does twice as many on
// Zen 5, as many on Zen 4, half as many on Intel's Sapphire and Granite Rapids (measured). Always
// the same answer on one machine.
bool dot_products_are_fast();

// The contract of gemm for Compute::kBF16 and FP8 or BF16 weights.
void gemm_dot(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int64_t num_rows, float* const* y, void* scratch);

}  // namespace matmul_avx512bf16
}  // namespace moechat
