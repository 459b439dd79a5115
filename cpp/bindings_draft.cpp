// Bindings of the drafters.
#include <algorithm>
#include <memory>

#include "bindings.h"
#include "common/status.h"
#include "decode/draft.h"

namespace py = pybind11;

namespace moechat {

void register_draft(py::module_& m) {
  py::class_<Drafter>(m, "Drafter", "Guesses the token after the next one for generations.");

  py::class_<MtpDrafter, Drafter>(m, "MtpDrafter", "Drafts by the multi-token-prediction layer.")
      .def(py::init([](const PyModel& model, ThreadPool& pool) {
             return std::make_unique<MtpDrafter>(model.model, pool);
           }),
           py::arg("model"), py::arg("pool"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly("logits", [](const MtpDrafter& self) {
        return py::array_t<float>(static_cast<py::ssize_t>(self.logits().size()),
                                  self.logits().data());
      });

  py::class_<ScriptedDrafter, Drafter>(m, "ScriptedDrafter",
                                       "Drafts a known text with a given hit rate.")
      .def(py::init([](std::vector<int32_t> script, int32_t first_position, double hit_rate,
                       uint64_t seed, int64_t vocab) {
             check(vocab > 1, "a drafter needs two tokens to choose from");
             check(std::all_of(script.begin(), script.end(),
                               [vocab](int32_t id) { return id >= 0 && id < vocab; }),
                   "a token id is outside the vocabulary");
             check(hit_rate >= 0 && hit_rate <= 1, "a hit rate lies in [0, 1]");
             return std::make_unique<ScriptedDrafter>(std::move(script), first_position, hit_rate,
                                                      seed, vocab);
           }),
           py::arg("script"), py::arg("first_position"), py::arg("hit_rate"), py::arg("seed"),
           py::arg("vocab"));
}

}  // namespace moechat
