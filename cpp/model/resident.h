// Resident weights (design 3.1): copies of the MLPs' matrices in the memory of the machine's NUMA
// nodes. Every node holds its share of the inner elements of every MLP: its outputs of gate and up,
// its inputs of down.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/node_memory.h"
#include "cpu/threads.h"
#include "model/model.h"

namespace moechat {

// Owns the copies and, once they are in use, takes them back from the model when it ends. install(),
// release() and the destructor may not run while a job does.
class ResidentWeights {
 public:
  // Plans one share for each node of the pool; allocates nothing. The model must outlive this.
  ResidentWeights(Model& model, ThreadPool& pool);
  ~ResidentWeights() { release(); }
  ResidentWeights(const ResidentWeights&) = delete;
  ResidentWeights& operator=(const ResidentWeights&) = delete;

  const std::vector<int64_t>& node_bytes() const { return node_bytes_; }
  // MLPs that have copies, and those whose formats have no place to cut: they stay where they are.
  int64_t num_resident() const { return static_cast<int64_t>(plans_.size()); }
  int64_t num_mapped() const { return num_mapped_; }

  // Copies about `max_bytes` more, each share by workers of its node if they can. Returns the bytes
  // copied, 0 when all is done. The first call allocates; throws Status "does-not-fit".
  int64_t fill(int64_t max_bytes);
  // The model computes with the copies from now on. All must be filled.
  void install();
  // The model computes with the mapping again; frees the copies. Nothing else can follow.
  void release();

 private:
  struct Plan {
    MlpWeights* mlp;
    std::vector<MlpPart> parts;  // views of the mapping, then of the copies
  };
  // One matrix of one share.
  struct Copy {
    MatrixView* view;
    size_t offset, bytes;  // in the node's memory
  };

  void add(MlpWeights& mlp);
  void allocate();

  Model& model_;
  ThreadPool& pool_;
  std::vector<Plan> plans_;
  std::vector<std::vector<Copy>> copies_;  // of every node
  std::vector<size_t> next_copy_;          // of every node
  std::vector<int64_t> node_bytes_;
  std::vector<NodeMemory> memory_;         // of every node
  int64_t num_mapped_ = 0;
  bool installed_ = false, released_ = false;
};

}  // namespace moechat
