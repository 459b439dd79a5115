// Bindings of the thread pool and the routed experts.
#include <memory>

#include "bindings.h"
#include "cpu/features.h"
#include "cpu/threads.h"
#include "kernels/experts/experts.h"

namespace py = pybind11;

namespace moechat {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;
using FloatArray = py::array_t<float, py::array::c_style>;

// The routed experts of one model, with the buffers and the job that calls share. Not for two
// threads at once.
class PyExperts {
 public:
  PyExperts(const PyModel& model, ThreadPool& pool)
      : model_(model.model), pool_(pool), experts_(active_instruction_set(), pool) {
    experts_.add_phases(job_, &call_);
    call_.with_shared = false;
  }

  void run(int64_t layer, const FloatArray& x, const IntArray& ids, const FloatArray& weights,
           FloatArray out) {
    const ModelDims& d = model_.dims;
    check(layer >= 0 && layer < static_cast<int64_t>(model_.layers.size()), "layer out of range");
    const LayerWeights& layer_weights = model_.layers[static_cast<size_t>(layer)];
    check(layer_weights.is_moe, "this layer has no routed experts");
    check(x.ndim() == 2 && x.shape(1) == d.hidden, "x must be [rows, hidden]");
    check(ids.ndim() == 2 && ids.shape(0) == x.shape(0) && ids.shape(1) > 0,
          "ids must be [rows, k]");
    check(weights.ndim() == 2 && weights.shape(0) == ids.shape(0) &&
              weights.shape(1) == ids.shape(1),
          "weights must be [rows, k]");
    check(out.ndim() == 2 && out.shape(0) == x.shape(0) && out.shape(1) == d.hidden,
          "out must be [rows, hidden]");
    const py::ssize_t k = ids.shape(1);
    for (py::ssize_t i = 0; i < ids.size(); ++i) {
      check(ids.data()[i] >= 0 && ids.data()[i] < d.num_experts, "an expert id is out of range");
      for (py::ssize_t j = i / k * k; j < i; ++j)
        check(ids.data()[i] != ids.data()[j], "an expert stands twice in a row");
    }
    call_.dims = &d;
    call_.layer = &layer_weights;
    call_.compute = model_.compute;
    call_.num_rows = x.shape(0);
    call_.experts_per_token = k;
    call_.x = x.data();
    call_.ids = ids.data();
    call_.weights = weights.data();
    call_.y = out.mutable_data();
    const py::gil_scoped_release release;
    pool_.run(Priority::kDecode, job_);
  }

 private:
  const Model& model_;
  ThreadPool& pool_;
  Experts experts_;
  ExpertsCall call_;
  Job job_;
};

py::list profile(const ThreadPool& pool, const std::string& priority) {
  check(priority == "decode" || priority == "prefill", "priority is 'decode' or 'prefill'");
  py::list phases;
  for (const PhaseTimes& phase :
       pool.profile(priority == "decode" ? Priority::kDecode : Priority::kPrefill))
    phases.append(py::dict(
        py::arg("phase") = phase.name, py::arg("count") = phase.count,
        py::arg("tasks") = phase.tasks, py::arg("open_seconds") = phase.open_seconds,
        py::arg("wall_seconds") = phase.wall_seconds, py::arg("busy_seconds") = phase.busy_seconds,
        py::arg("longest_seconds") = phase.longest_seconds));
  return phases;
}

}  // namespace

void register_experts(py::module_& m) {
  m.def("available_cpus", &available_cpus, "CPUs of this process by affinity and cgroup quota.");

  py::class_<ThreadPool>(m, "ThreadPool", "The worker threads that decode and prefill share.")
      .def(py::init([](int num_threads, const std::vector<std::pair<int, std::vector<int>>>& nodes,
                       bool pin) {
             Topology topology;
             for (const auto& [id, cpus] : nodes) topology.nodes.push_back({id, cpus});
             return std::make_unique<ThreadPool>(
                 num_threads, nodes.empty() ? Topology::single() : topology, pin);
           }),
           py::arg("num_threads"), py::arg("nodes") = py::tuple(), py::arg("pin") = false)
      .def_property_readonly("num_threads", &ThreadPool::num_threads)
      .def_property_readonly(
          "num_nodes", [](const ThreadPool& self) { return self.topology().num_nodes(); })
      .def("set_decode_share", &ThreadPool::set_decode_share, py::arg("share"),
           "What decode gets of the workers while prefill works as well, between 0 and 1.")
      .def("set_profiling", &ThreadPool::set_profiling, py::arg("on"),
           "Start or stop keeping times of phases; call while nothing runs.")
      .def("profile", &profile, py::arg("priority"),
           "Times of the phases since profiling began, by name, of 'decode' or 'prefill'.");

  py::class_<PyExperts>(m, "Experts", "The routed experts of one model on one pool.")
      .def(py::init<const PyModel&, ThreadPool&>(), py::arg("model"), py::arg("pool"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("run", &PyExperts::run, py::arg("layer"), py::arg("x"), py::arg("ids"),
           py::arg("weights"), py::arg("out").noconvert(),
           "out[r] = sum of weights[r][k] * expert ids[r][k] of x[r]; out float32 [rows, hidden].");
}

}  // namespace moechat
