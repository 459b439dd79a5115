#include "kernels/rope/rope.h"

#include <cmath>

namespace moechat {

void rope_angles(int64_t position, const float* inverse_frequencies, int64_t pairs,
                 float amplitude, float* cos_sin) {
  for (int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(inverse_frequencies[i]);
    cos_sin[2 * i] = amplitude * static_cast<float>(std::cos(angle));
    cos_sin[2 * i + 1] = amplitude * static_cast<float>(std::sin(angle));
  }
}

void rope_interleaved(const float* cos_sin, int64_t pairs, float* x) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * c - odd * s;
    x[2 * i + 1] = even * s + odd * c;
  }
}

}  // namespace moechat
