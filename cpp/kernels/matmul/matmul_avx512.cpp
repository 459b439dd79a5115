#include "kernels/matmul/formats.h"
#include "kernels/matmul/groups.h"
#include "kernels/matmul/lanes_avx512.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_avx512 {
#include "kernels/matmul/decoders.inl"

#include "kernels/matmul/inputs_f32.inl"

#include "kernels/matmul/values.inl"

#include "kernels/matmul/gemv_f32.inl"

#include "kernels/matmul/gemm_f32.inl"

#include "kernels/matmul/gemv_transposed_f32.inl"
}  // namespace matmul_avx512

const MatmulKernels kMatmulAvx512 = {matmul_avx512::gemv, matmul_avx512::gemm,
                                   matmul_avx512::gemv_transposed};

}  // namespace moechat
