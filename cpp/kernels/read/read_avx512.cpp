#include <immintrin.h>

#include "kernels/read/read.h"

namespace moechat {
namespace {

// Eight accumulators: enough additions in flight for memory, not the adder, to be the limit.
template <bool kPrefetch>
uint64_t sum_words(const uint8_t* bytes, int64_t num_bytes) {
  __m512i sums[8];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 512 <= num_bytes; i += 512)
    for (int v = 0; v < 8; ++v) {
      const uint8_t* lanes = bytes + i + v * 64;
      if (kPrefetch)
        _mm_prefetch(reinterpret_cast<const char*>(lanes + kReadAheadBytes), _MM_HINT_T0);
      sums[v] = _mm512_add_epi64(sums[v], _mm512_loadu_si512(lanes));
    }
  for (int v = 1; v < 8; ++v) sums[0] = _mm512_add_epi64(sums[0], sums[v]);
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, sums[0]);
  uint64_t total = read_checksum_ref(bytes + i, num_bytes - i);
  for (const uint64_t word : words) total += word;
  return total;
}

}  // namespace

uint64_t read_checksum_avx512(const uint8_t* bytes, int64_t num_bytes, bool prefetch) {
  return prefetch ? sum_words<true>(bytes, num_bytes) : sum_words<false>(bytes, num_bytes);
}

}  // namespace moechat
