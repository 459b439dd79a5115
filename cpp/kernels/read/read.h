// Plain reading: the memory rate that matrix kernels are measured against. The checksum is the sum
// of the little-endian 64-bit words modulo 2^64, the last one filled up with zeros; it is the same
// on every instruction set, so that reading cannot be optimised away and can be tested.
#pragma once
#include <cstdint>

#include "cpu/threads.h"

namespace moechat {

// Hints run this far ahead of the loads: over the page that the hardware's own prefetcher stops at.
constexpr int64_t kReadAheadBytes = 4096;

// `prefetch`: with software prefetch of the bytes kReadAheadBytes ahead.
uint64_t read_checksum_ref(const uint8_t* bytes, int64_t num_bytes, bool prefetch = false);
uint64_t read_checksum_avx2(const uint8_t* bytes, int64_t num_bytes, bool prefetch = false);
uint64_t read_checksum_avx512(const uint8_t* bytes, int64_t num_bytes, bool prefetch = false);

// With the widest loads of this CPU, whatever instruction set is forced.
uint64_t read_checksum(const uint8_t* bytes, int64_t num_bytes, bool prefetch);

// The same by all threads of the pool, as a decode job with tasks of kReadTaskBytes.
constexpr int64_t kReadTaskBytes = int64_t{4} << 20;
uint64_t read_in_parallel(ThreadPool& pool, const uint8_t* bytes, int64_t num_bytes, bool prefetch);

}  // namespace moechat
