#include "common/number_formats.h"
#include "kernels/vector/vector_ops.h"

namespace moechat {
namespace vector_ref {
#include "kernels/vector/vector_ops.inl"
}  // namespace vector_ref

const VectorKernels kVectorRef = {
    vector_ref::rms_norm,
    vector_ref::silu_mul,
    vector_ref::gelu_tanh_mul,
    vector_ref::swiglu_clamped,
    vector_ref::softcap,
    vector_ref::exp_sum,
    vector_ref::max,
    vector_ref::axpy,
    vector_ref::scale,
    vector_ref::to_bf16,
};

}  // namespace moechat
