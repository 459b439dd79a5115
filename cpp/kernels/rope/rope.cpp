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

void rope_rotate(const float* cos_sin, int64_t pairs, bool interleaved, float* x) {
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float first = x[step * i], second = x[step * i + partner];
    x[step * i] = first * c - second * s;
    x[step * i + partner] = first * s + second * c;
  }
}

}  // namespace moechat
