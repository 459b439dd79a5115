// Bindings of the machine's NUMA nodes and of weights that are resident on them.
#include <memory>
#include <numeric>

#include "bindings.h"
#include "cpu/topology.h"
#include "model/resident.h"

namespace py = pybind11;

namespace moechat {
namespace {

using PyNodes = std::vector<std::pair<int, std::vector<int>>>;

PyNodes discover(const std::string& root) {
  PyNodes nodes;
  for (const Node& node : Topology::discover(root).nodes) nodes.emplace_back(node.id, node.cpus);
  return nodes;
}

}  // namespace

void register_resident(py::module_& m) {
  m.def("numa_nodes", &discover, py::arg("root") = "/sys/devices/system/node",
        "(number, CPUs that this thread may use) of every NUMA node below root that has any.");

  py::class_<ResidentWeights>(m, "ResidentWeights",
                              "Copies of a model's MLPs in the memory of its pool's nodes.")
      .def(py::init([](PyModel& model, ThreadPool& pool) {
             return std::make_unique<ResidentWeights>(model.model, pool);
           }),
           py::arg("model"), py::arg("pool"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly("node_bytes", &ResidentWeights::node_bytes)
      .def_property_readonly("num_resident", &ResidentWeights::num_resident)
      .def_property_readonly("num_mapped", &ResidentWeights::num_mapped)
      .def("fill",
           [](ResidentWeights& self, int64_t max_bytes) {
             check(max_bytes > 0, "max_bytes must be positive");
             const py::gil_scoped_release release;
             return self.fill(max_bytes);
           },
           py::arg("max_bytes"), "Copy about max_bytes more; the bytes copied, 0 when all is done.")
      .def("install", &ResidentWeights::install,
           "Compute with the copies from now on; call while nothing runs.")
      .def("release", &ResidentWeights::release,
           "Compute with the mapping again and free the copies; call while nothing runs.");
}

}  // namespace moechat
