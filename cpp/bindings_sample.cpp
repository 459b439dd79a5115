// Binding of the sampler: checks dtypes, shapes and ids.
#include "bindings.h"
#include "common/status.h"
#include "sample/philox.h"
#include "sample/sampler.h"

namespace py = pybind11;

namespace moechat {
namespace {

using FloatArray = py::array_t<float, py::array::c_style>;
using IdArray = py::array_t<int32_t, py::array::c_style>;

}  // namespace

void register_sample(py::module_& m) {
  py::class_<Sampler>(m, "Sampler", "The sampling chain of one answer; see moechat.sample.chain.")
      .def(py::init([](int64_t vocab, double temperature, int64_t top_k, double top_p, double min_p,
                       double repetition_penalty, double presence_penalty, uint64_t seed) {
             return Sampler({temperature, top_k, top_p, min_p, repetition_penalty,
                             presence_penalty, seed},
                            vocab);
           }),
           py::kw_only(), py::arg("vocab"), py::arg("temperature"), py::arg("top_k"),
           py::arg("top_p"), py::arg("min_p"), py::arg("repetition_penalty"),
           py::arg("presence_penalty"), py::arg("seed"))
      .def_property_readonly("vocab", &Sampler::vocab)
      .def(
          "add_context",
          [](Sampler& self, const IdArray& ids) {
            check(ids.ndim() == 1, "ids must have one dimension");
            self.add_context(ids.data(), ids.size());
          },
          py::arg("ids").noconvert(), "Ids of the prompt, int32 [n].")
      .def(
          "sample",
          [](Sampler& self, const FloatArray& logits, uint64_t position) {
            check(logits.ndim() == 1 && logits.size() == self.vocab(), "logits must be [vocab]");
            return self.sample(logits.data(), position);
          },
          py::arg("logits").noconvert(), py::arg("position"),
          "The token for a position; logits float32 [vocab], contiguous.")
      .def("accept", &Sampler::accept, py::arg("id"), "A token of the answer.");
  m.def(
      "philox4x32",
      [](std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
        return philox4x32(counter, key);
      },
      py::arg("counter"), py::arg("key"), "Ten rounds of Philox: four random words.");
}

}  // namespace moechat
