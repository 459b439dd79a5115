#include "kernels/read/read.h"

#include <algorithm>
#include <atomic>

#include "cpu/features.h"

namespace moechat {

uint64_t read_checksum(const uint8_t* bytes, int64_t num_bytes, bool prefetch) {
  const CpuFeatures& features = cpu_features();
  if (features.avx512) return read_checksum_avx512(bytes, num_bytes, prefetch);
  if (features.avx2_fma_f16c) return read_checksum_avx2(bytes, num_bytes, prefetch);
  return read_checksum_ref(bytes, num_bytes, prefetch);
}

uint64_t read_in_parallel(ThreadPool& pool, const uint8_t* bytes, int64_t num_bytes,
                          bool prefetch) {
  std::atomic<uint64_t> total{0};
  Job job;
  job.phases.push_back(
      {[num_bytes] { return (num_bytes + kReadTaskBytes - 1) / kReadTaskBytes; },
       [&total, bytes, num_bytes, prefetch](int64_t task, int) {
         const int64_t begin = task * kReadTaskBytes;
         const int64_t count = std::min(kReadTaskBytes, num_bytes - begin);
         // Tasks begin at whole words of the range, so the sums of the parts are the whole sum.
         total.fetch_add(read_checksum(bytes + begin, count, prefetch), std::memory_order_relaxed);
       }});
  pool.run(Priority::kDecode, job);
  return total.load();
}

}  // namespace moechat
