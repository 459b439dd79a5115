// Rotary position embedding, on interleaved pairs (0,1), (2,3), ... or on halves (0,n), (1,n+1), ...
#pragma once
#include <cstdint>

namespace moechat {

// cos_sin[2 * i], [2 * i + 1] = amplitude * cos, sin of position * inverse_frequencies[i];
// `pairs` entries. The angle is formed in double, so that it stays exact at long contexts.
void rope_angles(int64_t position, const float* inverse_frequencies, int64_t pairs,
                 float amplitude, float* cos_sin);

// Rotates x[2 * pairs] in place; pair i is (2 i, 2 i + 1) when interleaved, else (i, i + pairs).
void rope_rotate(const float* cos_sin, int64_t pairs, bool interleaved, float* x);

}  // namespace moechat
