#include "cpu/node_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <string>
#include <utility>

#include "common/status.h"

namespace moechat {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kBind = 2;  // MPOL_BIND of linux/mempolicy.h

void bind_to(void* memory, size_t bytes, int node) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  constexpr int kMaxNodeId = 1024;
  unsigned long mask[kMaxNodeId / kBits] = {};
  if (node < 0 || node >= kMaxNodeId) return;
  mask[node / kBits] = 1ul << (node % kBits);
  syscall(SYS_mbind, memory, bytes, kBind, mask, kMaxNodeId, 0);
}

}  // namespace

NodeMemory::NodeMemory(size_t bytes, int node) {
  if (bytes == 0) return;
  // Whole huge pages, and room to begin at the edge of one.
  const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  mapping_bytes_ = rounded + kHugePage;
  void* memory = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Status("does-not-fit", "the system refused " + std::to_string(bytes) + " bytes");
  mapping_ = memory;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  data_ = static_cast<uint8_t*>(memory) + (kHugePage - address % kHugePage) % kHugePage;
  madvise(data_, rounded, MADV_HUGEPAGE);
  bind_to(data_, rounded, node);
}

NodeMemory::~NodeMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

NodeMemory::NodeMemory(NodeMemory&& other) noexcept { *this = std::move(other); }

NodeMemory& NodeMemory::operator=(NodeMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  return *this;
}

}  // namespace moechat
