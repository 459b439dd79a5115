// Bodies of the vector kernels. Included by vector_ops_<isa>.cpp inside that ISA's namespace, so
// that no inline function compiled for one instruction set can be linked into another.
// Sums use kLanes partial sums in a fixed order: vectorisable without reassociation by the compiler.

constexpr int kLanes = 16;

[[gnu::always_inline]] inline float reduce_lanes(const float* lanes) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// exp by 2^n * polynomial (Cephes coefficients, relative error about 2e-7). 0 below -87.3, +inf
// above 88.7, NaN for NaN.
[[gnu::always_inline]] inline float fast_exp(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  const uint32_t bits = static_cast<uint32_t>((exponent - 0x4b400000 + 127)) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  float y = p * power;
  y = x < -87.3f ? 0.0f : y;
  y = x > 88.7f ? __builtin_inff() : y;
  return x == x ? y : x;
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * x[i + l];
  for (int l = 0; i < n; ++i, ++l) lanes[l] += x[i] * x[i];
  const float inv = 1.0f / __builtin_sqrtf(reduce_lanes(lanes) / static_cast<float>(n) + eps);
  for (int64_t j = 0; j < n; ++j) y[j] = x[j] * inv * weight[j];
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
}

void gelu_tanh_mul(const float* gate, const float* up, int64_t n, float* y) {
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi): 0.5 (1 + tanh z) = sigmoid(2 z)
  for (int64_t i = 0; i < n; ++i) {
    const float v = gate[i];
    const float z = kTwiceRoot * (v + 0.044715f * v * v * v);
    y[i] = v / (1.0f + fast_exp(-z)) * up[i];
  }
}

void swiglu_clamped(const float* gate, const float* up, float limit, float alpha, int64_t n,
                    float* y) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i] > limit ? limit : gate[i];
    const float u = up[i] > limit ? limit : (up[i] < -limit ? -limit : up[i]);
    y[i] = (u + 1.0f) * (g / (1.0f + fast_exp(-alpha * g)));
  }
}

void softcap(float* x, float cap, int64_t n) {
  const float twice = 2.0f / cap;
  for (int64_t i = 0; i < n; ++i) x[i] = cap - 2.0f * cap / (fast_exp(twice * x[i]) + 1.0f);
}

float exp_sum(float* x, float shift, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      x[i + l] = fast_exp(x[i + l] - shift);
      lanes[l] += x[i + l];
    }
  for (int l = 0; i < n; ++i, ++l) {
    x[i] = fast_exp(x[i] - shift);
    lanes[l] += x[i];
  }
  return reduce_lanes(lanes);
}

float max(const float* x, int64_t n) {
  float best[kLanes], nan_probe[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    best[l] = -__builtin_inff();
    nan_probe[l] = 0;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      best[l] = x[i + l] > best[l] ? x[i + l] : best[l];
      nan_probe[l] += x[i + l] != x[i + l] ? x[i + l] : 0.0f;
    }
  for (int l = 0; i < n; ++i, ++l) {
    best[l] = x[i] > best[l] ? x[i] : best[l];
    nan_probe[l] += x[i] != x[i] ? x[i] : 0.0f;
  }
  for (int l = 1; l < kLanes; ++l) {
    best[0] = best[l] > best[0] ? best[l] : best[0];
    nan_probe[0] += nan_probe[l];
  }
  return nan_probe[0] != nan_probe[0] ? nan_probe[0] : best[0];
}

void axpy(float a, const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void scale(float* x, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= a;
}

void to_bf16(const float* x, int64_t n, uint16_t* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = f32_to_bf16(x[i]);
}
