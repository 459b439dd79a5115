#include "model/resident.h"

#include "common/status.h"
#include "model/compact_copy.h"
#include "model/split_mlp.h"

namespace moechat {
namespace {

// function(layer) for every layer of the model, its draft layer included.
template <typename Function>
void for_layers(Model& model, const Function& function) {
  for (LayerWeights& layer : model.layers) function(layer);
  if (model.draft != nullptr) for_layers(*model.draft, function);
}

// function(mlp) for every MLP of a layer that is computed.
template <typename Function>
void for_mlps(LayerWeights& layer, const Function& function) {
  if (!layer.is_moe) return function(layer.dense);
  if (layer.has_shared) function(layer.shared);
  for (MlpWeights& expert : layer.experts) function(expert);
}

}  // namespace

ResidentWeights::ResidentWeights(Model& model, ThreadPool& pool) : model_(model), pool_(pool) {
  const auto num_nodes = static_cast<size_t>(pool.topology().num_nodes());
  copies_.resize(num_nodes);
  next_copy_.resize(num_nodes);
  node_bytes_.resize(num_nodes);
  memory_.resize(num_nodes);
  for_layers(model, [this](LayerWeights& layer) {
    for_mlps(layer, [this](MlpWeights& mlp) { add(mlp); });
  });
  for (Plan& plan : plans_)  // only now: the plans stay where they are
    for (size_t n = 0; n < num_nodes; ++n)
      for (MatrixView MlpPart::*matrix : {&MlpPart::gate, &MlpPart::up, &MlpPart::down}) {
        MatrixView& view = plan.parts[n].*matrix;
        if (view.data == nullptr) continue;
        const size_t bytes = compact_bytes(view);
        copies_[n].push_back({&view, static_cast<size_t>(node_bytes_[n]), bytes});
        node_bytes_[n] += static_cast<int64_t>(bytes);
      }
}

void ResidentWeights::add(MlpWeights& mlp) {
  if (!mlp.parts.empty()) throw Status("bad-argument", "the weights are resident already");
  const int num_nodes = pool_.topology().num_nodes();
  const std::vector<int64_t> edges = mlp_edges(mlp, num_nodes);
  if (edges.empty()) {
    ++num_mapped_;
    return;
  }
  Plan plan{&mlp, {}};
  for (size_t n = 0; n < static_cast<size_t>(num_nodes); ++n)
    plan.parts.push_back(mlp_part(mlp, edges[n], edges[n + 1]));
  plans_.push_back(std::move(plan));
}

void ResidentWeights::allocate() {
  for (size_t n = 0; n < memory_.size(); ++n)
    if (memory_[n].data() == nullptr)
      memory_[n] = NodeMemory(static_cast<size_t>(node_bytes_[n]), pool_.topology().nodes[n].id);
}

int64_t ResidentWeights::fill(int64_t max_bytes) {
  if (released_) throw Status("bad-argument", "the weights were released");
  allocate();
  const auto num_nodes = static_cast<int64_t>(copies_.size());
  std::vector<int64_t> node_begin;
  std::vector<std::pair<size_t, size_t>> tasks;  // node, copy
  int64_t total = 0;
  for (size_t n = 0; n < copies_.size(); ++n) {
    node_begin.push_back(static_cast<int64_t>(tasks.size()));
    int64_t bytes = 0;
    for (size_t& next = next_copy_[n]; next < copies_[n].size() && bytes * num_nodes < max_bytes;
         ++next) {
      tasks.emplace_back(n, next);
      bytes += static_cast<int64_t>(copies_[n][next].bytes);
    }
    total += bytes;
  }
  Job job;
  Phase phase{[&] { return static_cast<int64_t>(tasks.size()); },
              [&](int64_t task, int) {
                const auto [node, index] = tasks[static_cast<size_t>(task)];
                const Copy& copy = copies_[node][index];
                *copy.view = compact_copy(*copy.view, memory_[node].data() + copy.offset);
              },
              "resident"};
  phase.node_begin = &node_begin;
  job.phases.push_back(std::move(phase));
  pool_.run(Priority::kPrefill, job);
  return total;
}

void ResidentWeights::install() {
  if (released_) throw Status("bad-argument", "the weights were released");
  for (size_t n = 0; n < copies_.size(); ++n)
    if (next_copy_[n] < copies_[n].size())
      throw Status("bad-argument", "the weights are not all resident yet");
  installed_ = true;
  for (Plan& plan : plans_) plan.mlp->parts = plan.parts;
  for_layers(model_, [](LayerWeights& layer) {
    for_mlps(layer, [&layer](MlpWeights& mlp) {
      layer.num_parts = std::max(layer.num_parts, static_cast<int64_t>(mlp.parts.size()));
    });
  });
}

void ResidentWeights::release() {
  if (installed_) {
    for (const Plan& plan : plans_) plan.mlp->parts.clear();
    for_layers(model_, [](LayerWeights& layer) { layer.num_parts = 1; });
  }
  installed_ = false;
  released_ = true;
  memory_.clear();
}

}  // namespace moechat
