// Contract of the small vector kernels: one vectorisable body (vector_ops.inl), compiled once for
// each instruction set. All float32; within one instruction set results depend on inputs alone.
#pragma once
#include <cstdint>

namespace moechat {

struct VectorKernels {
  // y = x / rms(x) * weight, rms(x) = sqrt(mean(x^2) + eps). y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
  // y = silu(gate) * up, silu(v) = v / (1 + exp(-v)). y may be gate or up.
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
  // y = gelu(gate) * up with the tanh form of gelu (Hendrycks and Gimpel, section 2). y may be gate.
  void (*gelu_tanh_mul)(const float* gate, const float* up, int64_t n, float* y);
  // gpt-oss: gate <= limit, |up| <= limit, y = (up + 1) * gate * sigmoid(alpha * gate). y may be
  // gate.
  void (*swiglu_clamped)(const float* gate, const float* up, float limit, float alpha, int64_t n,
                         float* y);
  // x = cap * tanh(x / cap).
  void (*softcap)(float* x, float cap, int64_t n);
  // x = exp(x - shift); returns the sum. exp(-inf) is 0.
  float (*exp_sum)(float* x, float shift, int64_t n);
  // Largest element; -inf for n == 0; NaN if any element is NaN.
  float (*max)(const float* x, int64_t n);
  // y += a * x.
  void (*axpy)(float a, const float* x, int64_t n, float* y);
  // x *= a.
  void (*scale)(float* x, float a, int64_t n);
  // y = x rounded to BF16.
  void (*to_bf16)(const float* x, int64_t n, uint16_t* y);
};

extern const VectorKernels kVectorRef;
extern const VectorKernels kVectorAvx2;
extern const VectorKernels kVectorAvx512;

}  // namespace moechat
