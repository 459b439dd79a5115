// Plain reading: the memory rate that matrix kernels are measured against. The checksum is the sum
// of the little-endian 64-bit words modulo 2^64, the last one filled up with zeros; it is the same
// on every instruction set, so that reading cannot be optimised away and can be tested.
#pragma once
#include <cstdint>

namespace moechat {

uint64_t read_checksum_ref(const uint8_t* bytes, int64_t num_bytes);
uint64_t read_checksum_avx2(const uint8_t* bytes, int64_t num_bytes);
uint64_t read_checksum_avx512(const uint8_t* bytes, int64_t num_bytes);

}  // namespace moechat
