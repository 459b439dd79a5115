// gemm with BF16 activations and vdpbf16ps.
#pragma once
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_avx512bf16 {

// As gemm in matmul.h with Compute::kBF16; false, and nothing done, for the weights that float32 is
// left to.
bool gemm_dot(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int64_t num_rows, float* const* y, void* scratch);

}  // namespace matmul_avx512bf16
}  // namespace moechat
