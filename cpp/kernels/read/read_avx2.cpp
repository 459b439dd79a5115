#include <immintrin.h>

#include "kernels/read/read.h"

namespace moechat {
namespace {

// Eight accumulators: enough additions in flight for memory, not the adder, to be the limit.
template <bool kPrefetch>
uint64_t sum_words(const uint8_t* bytes, int64_t num_bytes) {
  __m256i sums[8];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 256 <= num_bytes; i += 256)
    for (int v = 0; v < 8; ++v) {
      const uint8_t* lanes = bytes + i + v * 32;
      if (kPrefetch && v % 2 == 0)
        _mm_prefetch(reinterpret_cast<const char*>(lanes + kReadAheadBytes), _MM_HINT_T0);
      sums[v] =
          _mm256_add_epi64(sums[v], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
    }
  for (int v = 1; v < 8; ++v) sums[0] = _mm256_add_epi64(sums[0], sums[v]);
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sums[0]);
  return words[0] + words[1] + words[2] + words[3] +
         read_checksum_ref(bytes + i, num_bytes - i);
}

}  // namespace

uint64_t read_checksum_avx2(const uint8_t* bytes, int64_t num_bytes, bool prefetch) {
  return prefetch ? sum_words<true>(bytes, num_bytes) : sum_words<false>(bytes, num_bytes);
}

}  // namespace moechat
