// The plain definition of the matrix products: one loop nest, any format, float32 sums in K order.
#include "common/number_formats.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_ref {

float weight_at(const MatrixView& w, int64_t row, int64_t col) {
  const uint8_t* p = w.data + row * w.row_stride_bytes + col * element_bytes(w.format);
  switch (w.format) {
    case Format::kF32: return load_f32(p);
    case Format::kBF16: return bf16_to_f32(load_u16(p));
    case Format::kFP8Block: return fp8_e4m3_to_f32(*p) * load_f32(w.scale_at(row, col));
  }
  return 0;
}

float input(float x, Compute compute) {
  return compute == Compute::kBF16 ? round_to_bf16(x) : x;
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void*) {
  for (int64_t n = row_begin; n < row_end; ++n)
    for (int64_t r = 0; r < num_rows; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < w.cols; ++k) sum += input(x[r][k], compute) * weight_at(w, n, k);
      y[r][n] = sum;
    }
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch) {
  gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void*) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t k = col_begin; k < col_end; ++k) y[r][k] = 0;
    for (int64_t n = 0; n < w.rows; ++n)
      for (int64_t k = col_begin; k < col_end; ++k)
        y[r][k] += input(x[r][n], compute) * weight_at(w, n, k);
  }
}

}  // namespace matmul_ref

const MatmulKernels kMatmulRef = {matmul_ref::gemv, matmul_ref::gemm, matmul_ref::gemv_transposed};

}  // namespace moechat
