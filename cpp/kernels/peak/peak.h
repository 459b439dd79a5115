// The most multiplications and additions that an instruction set's dot products reach: independent
// ones on registers alone. The denominator of "share of the peak".
#pragma once
#include <cstdint>

namespace moechat {

// Runs `iterations` rounds; returns how many multiplications and additions they were.
int64_t dot_peak_ref(int64_t iterations);         // float32, one at a time
int64_t dot_peak_avx2(int64_t iterations);        // float32 FMA, 8 lanes
int64_t dot_peak_avx512(int64_t iterations);      // float32 FMA, 16 lanes
int64_t dot_peak_avx512bf16(int64_t iterations);  // vdpbf16ps, 16 lanes of two products
int64_t dot_peak_amx(int64_t iterations);         // tdpbf16ps, 16 x 16 sums of 32 products

}  // namespace moechat
