#include "common/number_formats.h"
#include "kernels/vector/vector_ops.h"

namespace moechat {
namespace vector_avx2 {
#include "kernels/vector/vector_ops.inl"
}  // namespace vector_avx2

const VectorKernels kVectorAvx2 = {
    vector_avx2::rms_norm,
    vector_avx2::silu_mul,
    vector_avx2::gelu_tanh_mul,
    vector_avx2::swiglu_clamped,
    vector_avx2::softcap,
    vector_avx2::exp_sum,
    vector_avx2::max,
    vector_avx2::axpy,
    vector_avx2::scale,
    vector_avx2::to_bf16,
};

}  // namespace moechat
