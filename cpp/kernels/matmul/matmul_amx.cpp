// AMX: gemm, and gemv of BF16 and FP8 weights, with tdpbf16ps; the rest as with AVX-512 BF16.
#include <immintrin.h>

#include <cstring>

#include "kernels/matmul/block_amx.h"
#include "kernels/matmul/decoders_avx512bf16.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx512.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/nibbles_avx512bf16.h"

namespace moechat {
namespace matmul_amx {

using namespace matmul_avx512;
using namespace matmul_avx512bf16;
#include "kernels/matmul/decoders.inl"

#include "kernels/matmul/inputs_f32.inl"

#include "kernels/matmul/tile_inputs.inl"

#include "kernels/matmul/tile_decoders.inl"

#include "kernels/matmul/tile_nibbles.inl"

#include "kernels/matmul/tile_k_quants.inl"

#include "kernels/matmul/gemm_bf16.inl"

#include "kernels/matmul/gemv_amx.inl"

#include "kernels/matmul/gemv_fp8_few.inl"

#include "kernels/matmul/gemv_fp8_amx.inl"

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch, KeptInputs* kept) {
  if (compute == Compute::kBF16 && w.format == Format::kBF16 && w.col_step == 1)
    gemv_bf16(w, row_begin, row_end, x, num_rows, y, scratch, kept);
  else if (compute == Compute::kBF16 && takes_fp8(w))
    gemv_fp8(w, row_begin, row_end, x, num_rows, y, scratch, kept);
  else
    kMatmulAvx512bf16.gemv(w, row_begin, row_end, compute, x, num_rows, y, scratch, kept);
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  if (num_rows > kMaxGemvRows && compute == Compute::kBF16) {
    const TileRegisters registers;
    if (gemm_bf16(w, row_begin, row_end, x, num_rows, y, scratch)) return;
  }
  kMatmulAvx512bf16.gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  kMatmulAvx512.gemv_transposed(w, col_begin, col_end, compute, x, num_rows, y, scratch);
}

}  // namespace matmul_amx

const MatmulKernels kMatmulAmx = {matmul_amx::gemv, matmul_amx::gemm, matmul_amx::gemv_transposed};

}  // namespace moechat
