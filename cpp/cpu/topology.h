// NUMA nodes and their CPUs (sysfs: Documentation/ABI/stable/sysfs-devices-node of Linux).
#pragma once
#include <string>
#include <vector>

namespace moechat {

constexpr int kMaxNodes = 16;  // a machine that has more counts as one node

struct Node {
  int id = -1;            // the system's number; -1: none, memory is not bound
  std::vector<int> cpus;  // that workers are bound to; empty: any
};

struct Topology {
  std::vector<Node> nodes;  // 1..kMaxNodes

  int num_nodes() const { return static_cast<int>(nodes.size()); }
  // The node of every worker: shares go by the nodes' numbers of CPUs, workers of a node in a row.
  std::vector<int> nodes_of_workers(int num_workers) const;

  // One node without CPUs of its own: workers go where the system puts them.
  static Topology single() { return {{Node{}}}; }
  // The nodes below `root` that have CPUs of this thread's affinity mask. A folder that says
  // nothing, and more than kMaxNodes nodes, give one node of all CPUs.
  static Topology discover(const std::string& root = "/sys/devices/system/node");
};

// Throws Status "bad-argument" unless there are 1..kMaxNodes nodes with sensible CPU numbers.
void check_topology(const Topology& topology);

// Binds the calling thread to `cpus`; whatever the system refuses is left as it was.
void bind_thread(const std::vector<int>& cpus);

}  // namespace moechat
