// The plain definition of the matrix products: a stored row at a time, float32 sums in K order.
#include "common/number_formats.h"
#include "kernels/matmul/decode_row.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_ref {

float input(float x, Compute compute) {
  return compute == Compute::kBF16 ? round_to_bf16(x) : x;
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  float* weights = static_cast<float*>(scratch);
  for (int64_t n = row_begin; n < row_end; ++n) {
    decode_row(w, n, weights);
    for (int64_t r = 0; r < num_rows; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < w.cols; ++k) sum += input(x[r][k], compute) * weights[k];
      y[r][n] = sum;
    }
  }
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch, KeptInputs*) {
  gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  float* weights = static_cast<float*>(scratch);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t k = col_begin; k < col_end; ++k) y[r][k] = 0;
  for (int64_t n = 0; n < w.rows; ++n) {
    decode_columns(w, n, col_begin, col_end, weights);
    for (int64_t r = 0; r < num_rows; ++r) {
      const float value = input(x[r][n], compute);
      for (int64_t k = col_begin; k < col_end; ++k) y[r][k] += value * weights[k - col_begin];
    }
  }
}

}  // namespace matmul_ref

const MatmulKernels kMatmulRef = {matmul_ref::gemv, matmul_ref::gemm, matmul_ref::gemv_transposed};

}  // namespace moechat
