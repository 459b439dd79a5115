#include <cstring>

#include "kernels/read/read.h"

namespace moechat {

uint64_t read_checksum_ref(const uint8_t* bytes, int64_t num_bytes, bool prefetch) {
  uint64_t sum = 0;
  int64_t i = 0;
  for (; i + 8 <= num_bytes; i += 8) {
    if (prefetch && i % 64 == 0) __builtin_prefetch(bytes + i + kReadAheadBytes);
    uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    sum += word;
  }
  uint64_t last = 0;
  if (i < num_bytes) std::memcpy(&last, bytes + i, static_cast<size_t>(num_bytes - i));
  return sum + last;
}

}  // namespace moechat
