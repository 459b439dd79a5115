// Products of a weight as a layer means it, whichever way round it is stored.
#pragma once
#include "common/matrix_view.h"
#include "kernels/matmul/matmul.h"

namespace moechat {

// y[r][o] = sum_i x[r][i] W[o][i] for outputs [begin, end). Decode class up to kMaxGemvRows rows.
inline void multiply(const MatmulKernels& kernels, const MatrixView& w, int64_t begin, int64_t end,
                     Compute compute, const float* const* x, int64_t num_rows, float* const* y,
                     void* scratch, KeptInputs* kept = nullptr) {
  if (w.transposed)
    kernels.gemv_transposed(w, begin, end, compute, x, num_rows, y, scratch);
  else if (num_rows <= kMaxGemvRows)
    kernels.gemv(w, begin, end, compute, x, static_cast<int>(num_rows), y, scratch,
                 kept != nullptr && KeptInputs::fits(w, num_rows) ? kept : nullptr);
  else
    kernels.gemm(w, begin, end, compute, x, num_rows, y, scratch);
}

// y[r][i] = sum_o x[r][o] W[o][i] for inputs [begin, end).
inline void multiply_transposed(const MatmulKernels& kernels, const MatrixView& w, int64_t begin,
                                int64_t end, Compute compute, const float* const* x,
                                int64_t num_rows, float* const* y, void* scratch) {
  if (w.transposed)
    kernels.gemm(w, begin, end, compute, x, num_rows, y, scratch);
  else
    kernels.gemv_transposed(w, begin, end, compute, x, num_rows, y, scratch);
}

}  // namespace moechat
