// Rotary position embedding on interleaved pairs (0,1), (2,3), ... as DeepSeek stores them.
#pragma once
#include <cstdint>

namespace moechat {

// cos_sin[2 * i], [2 * i + 1] = amplitude * cos, sin of position * inverse_frequencies[i];
// `pairs` entries. The angle is formed in double, so that it stays exact at long contexts.
void rope_angles(int64_t position, const float* inverse_frequencies, int64_t pairs,
                 float amplitude, float* cos_sin);

// Rotates x[2 * pairs] in place.
void rope_interleaved(const float* cos_sin, int64_t pairs, float* x);

}  // namespace moechat
