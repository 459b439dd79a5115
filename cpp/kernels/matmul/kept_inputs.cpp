#include <atomic>

#include "kernels/matmul/matmul.h"

namespace moechat {

uint64_t new_input_names(uint64_t count) {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(count, std::memory_order_relaxed);
}

}  // namespace moechat
