// gemm with vdpbf16ps. A file of its own: matmul_avx512bf16.cpp has the gemv.
#include "kernels/matmul/gemm_avx512bf16.h"

#include <immintrin.h>

#include <cstring>

#include "kernels/matmul/block_avx512bf16.h"
#include "kernels/matmul/decoders_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx512.h"
#include "kernels/matmul/nibbles_avx512bf16.h"

namespace moechat {
namespace matmul_avx512bf16 {
namespace {

using namespace matmul_avx512;
#include "kernels/matmul/decoders.inl"

#include "kernels/matmul/inputs_f32.inl"

#include "kernels/matmul/tile_inputs.inl"

#include "kernels/matmul/tile_decoders.inl"

#include "kernels/matmul/tile_nibbles.inl"

#include "kernels/matmul/tile_k_quants.inl"

#include "kernels/matmul/gemm_bf16.inl"

}  // namespace

bool gemm_dot(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
              int64_t num_rows, float* const* y, void* scratch) {
  return gemm_bf16(w, row_begin, row_end, x, num_rows, y, scratch);
}

}  // namespace matmul_avx512bf16
}  // namespace moechat
