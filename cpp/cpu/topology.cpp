#include "cpu/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/status.h"

namespace moechat {
namespace {

// The numbers of a list like "0-3,8,10-11"; those outside a cpu_set_t are left out.
std::vector<int> parse_list(const char* text) {
  std::vector<int> numbers;
  while (*text != '\0') {
    char* end;
    const long first = std::strtol(text, &end, 10);
    if (end == text) break;
    long last = first;
    if (*end == '-') {
      text = end + 1;
      last = std::strtol(text, &end, 10);
      if (end == text) break;
    }
    for (long n = std::max(first, 0L); n <= std::min<long>(last, CPU_SETSIZE - 1); ++n)
      numbers.push_back(static_cast<int>(n));
    if (*end != ',') break;
    text = end + 1;
  }
  return numbers;
}

std::vector<int> read_list(const std::string& path) {
  char text[4096] = {};
  FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return {};
  const size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[length] = '\0';
  return parse_list(text);
}

std::vector<int> node_ids(const std::string& root) {
  std::vector<int> ids;
  DIR* folder = opendir(root.c_str());
  if (folder == nullptr) return ids;
  while (const dirent* entry = readdir(folder)) {
    int id = 0, length = 0;
    if (std::sscanf(entry->d_name, "node%6d%n", &id, &length) == 1 && id >= 0 &&
        entry->d_name[length] == '\0')
      ids.push_back(id);
  }
  closedir(folder);
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

std::vector<int> Topology::nodes_of_workers(int num_workers) const {
  std::vector<int> result;
  int64_t total = 0, sum = 0;
  for (const Node& node : nodes) total += std::max<int64_t>(1, node.cpus.size());
  for (int n = 0; n < num_nodes(); ++n) {
    sum += std::max<int64_t>(1, nodes[static_cast<size_t>(n)].cpus.size());
    const auto end = static_cast<size_t>((2 * sum * num_workers + total) / (2 * total));
    if (end > result.size()) result.resize(end, n);
  }
  return result;
}

Topology Topology::discover(const std::string& root) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return single();
  Topology topology;
  for (const int id : node_ids(root)) {
    Node node{id, read_list(root + "/node" + std::to_string(id) + "/cpulist")};
    const auto outside = [&](int cpu) { return !CPU_ISSET(cpu, &allowed); };
    node.cpus.erase(std::remove_if(node.cpus.begin(), node.cpus.end(), outside), node.cpus.end());
    if (!node.cpus.empty()) topology.nodes.push_back(std::move(node));
  }
  if (topology.num_nodes() >= 1 && topology.num_nodes() <= kMaxNodes) return topology;
  Node all;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) all.cpus.push_back(cpu);
  return {{all}};
}

void check_topology(const Topology& topology) {
  if (topology.num_nodes() < 1 || topology.num_nodes() > kMaxNodes)
    throw Status("bad-argument", "a topology has 1 to " + std::to_string(kMaxNodes) +
                                     " nodes, not " + std::to_string(topology.num_nodes()));
  for (const Node& node : topology.nodes)
    for (const int cpu : node.cpus)
      if (cpu < 0 || cpu >= CPU_SETSIZE)
        throw Status("bad-argument", "there is no CPU " + std::to_string(cpu));
}

void bind_thread(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  if (!cpus.empty()) sched_setaffinity(0, sizeof set, &set);
}

}  // namespace moechat
