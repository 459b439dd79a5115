#include "kernels/matmul/formats.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx2.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_avx2 {
#include "kernels/matmul/decoders.inl"

#include "kernels/matmul/inputs_f32.inl"

#include "kernels/matmul/values.inl"

#include "kernels/matmul/gemv_f32.inl"

#include "kernels/matmul/gemm_f32.inl"

#include "kernels/matmul/gemv_transposed_f32.inl"
}  // namespace matmul_avx2

const MatmulKernels kMatmulAvx2 = {matmul_avx2::gemv, matmul_avx2::gemm,
                                   matmul_avx2::gemv_transposed};

}  // namespace moechat
