#include "common/number_formats.h"
#include "kernels/vector/vector_ops.h"

namespace moechat {
namespace vector_avx512 {
#include "kernels/vector/vector_ops.inl"
}  // namespace vector_avx512

const VectorKernels kVectorAvx512 = {
    vector_avx512::rms_norm,
    vector_avx512::silu_mul,
    vector_avx512::gelu_tanh_mul,
    vector_avx512::swiglu_clamped,
    vector_avx512::softcap,
    vector_avx512::exp_sum,
    vector_avx512::max,
    vector_avx512::axpy,
    vector_avx512::scale,
    vector_avx512::to_bf16,
};

}  // namespace moechat
