// Anonymous memory of one NUMA node, in huge pages where the system has them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moechat {

class NodeMemory {
 public:
  NodeMemory() = default;
  // `node`: the system's number, or -1 for memory that is not bound. Pages appear when first
  // written. Where the system refuses to bind, they come from the node of whoever writes first.
  // Throws Status "does-not-fit".
  NodeMemory(size_t bytes, int node);
  ~NodeMemory();
  NodeMemory(NodeMemory&& other) noexcept;
  NodeMemory& operator=(NodeMemory&& other) noexcept;

  uint8_t* data() const { return data_; }  // aligned to a huge page

 private:
  uint8_t* data_ = nullptr;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace moechat
