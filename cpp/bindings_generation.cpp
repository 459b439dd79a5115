// Bindings of the token queue, of generations and of the decode loop.
#include "bindings_engine.h"
#include "cpu/threads.h"
#include "decode/generate.h"

namespace py = pybind11;

namespace moechat {
namespace {

using FloatArray = py::array_t<float, py::array::c_style>;

}  // namespace

void register_generation(py::module_& m) {
  py::class_<TokenQueue>(m, "TokenQueue", "Sampled tokens between the decode thread and a reader.")
      .def(py::init<>())
      .def("close", &TokenQueue::close)
      .def("pop",
           [](TokenQueue& self, double timeout_seconds) {
             check(timeout_seconds >= 0 && timeout_seconds <= 3600, "a timeout of 0..3600 seconds");
             bool finished = false;
             std::vector<TimedToken> taken;
             {
               const py::gil_scoped_release release;
               taken = self.pop(timeout_seconds, &finished);
             }
             std::vector<std::pair<int32_t, double>> tokens;
             for (const TimedToken& token : taken) tokens.emplace_back(token.id, token.seconds);
             return py::make_tuple(tokens, finished);
           },
           py::arg("timeout_seconds"));

  py::class_<Generation>(m, "Generation", "One session that is decoding.")
      .def(py::init([](const PyModel& model, KVCache& cache, Sampler& sampler, TokenQueue& queue,
                       const CancelFlag& cancel, int32_t token, int32_t position,
                       int64_t max_tokens, int64_t context_tokens, std::vector<int32_t> end_ids,
                       Drafter* drafter, KVCache* draft_cache) {
             check_cache(model.model, cache);
             check_tokens(model.model, &token, 1);
             check(max_tokens > 0, "max_tokens must be positive");
             check(sampler.vocab() == model.model.dims.vocab, "the sampler has another vocabulary");
             check_holds(cache, position);
             check(drafter == nullptr || drafter->serves(model.model),
                   "the drafter belongs to another model");
             if (draft_cache != nullptr) {
               check(model.model.draft != nullptr, "the model has no multi-token-prediction layer");
               check_cache(*model.model.draft, *draft_cache);
             }
             Generation generation{&cache,     &sampler,       &queue,  &cancel,
                                   token,      position,       max_tokens, context_tokens,
                                   std::move(end_ids), ""};
             generation.drafter = drafter;
             generation.draft_cache = draft_cache;
             return generation;
           }),
           py::arg("model"), py::arg("cache"), py::arg("sampler"), py::arg("queue"),
           py::arg("cancel"), py::arg("token"), py::arg("position"), py::arg("max_tokens"),
           py::arg("context_tokens"), py::arg("end_ids"), py::arg("drafter") = nullptr,
           py::arg("draft_cache") = nullptr, py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 12>(),
           py::keep_alive<1, 13>())
      .def_readonly("finish_reason", &Generation::finish_reason)
      .def_property_readonly("failure",
                             [](const Generation& generation) -> py::object {
                               if (!generation.failure) return py::none();
                               return py::make_tuple(generation.failure->name,
                                                     generation.failure->what());
                             })
      .def("goes_on", &goes_on,
           "Before a step: false once it has finished, was cancelled or is at the context's end.")
      .def("advance",
           [](Generation& self, const FloatArray& logits, int64_t first_bad_layer) {
             check(logits.ndim() == 1 && logits.size() == self.sampler->vocab(),
                   "logits must be float32 [vocab]");
             check(self.finish_reason.empty(), "the generation has finished");
             check(self.queue->room() > 0, "the generation's queue is full");
             const py::gil_scoped_release release;
             return advance(self, logits.data(), logits.size(), first_bad_layer);
           },
           py::arg("logits").noconvert(), py::arg("first_bad_layer") = -1,
           "What follows from a step that ran elsewhere; false when that ended the generation.")
      .def_property_readonly("queue_room",
                             [](const Generation& self) { return self.queue->room(); })
      .def_readonly("token", &Generation::token)
      .def_readonly("position", &Generation::position)
      .def_readonly("num_drafted", &Generation::num_drafted)
      .def_readonly("num_accepted", &Generation::num_accepted);

  m.def("generate",
        [](DecodeStep& step, const PyModel& model, const std::vector<Generation*>& generations,
           const CancelFlag& interrupt, int64_t max_steps) {
          check(max_steps >= 0, "the number of steps is negative");
          check(&step.model() == &model.model, "the step belongs to another model");
          for (size_t i = 0; i < generations.size(); ++i) {
            check(generations[i] != nullptr, "a generation cannot be None");
            check_holds(*generations[i]->cache, generations[i]->position);
            for (size_t j = 0; j < i; ++j)
              check(generations[i]->cache != generations[j]->cache &&
                        (generations[i]->draft_cache == nullptr ||
                         generations[i]->draft_cache != generations[j]->draft_cache),
                    "two generations share a cache");
          }
          const py::gil_scoped_release release;
          return generate(step, generations, model.model.dims.vocab, interrupt, max_steps);
        },
        py::arg("step"), py::arg("model"), py::arg("generations"), py::arg("interrupt"),
        py::arg("max_steps") = 0);
}

}  // namespace moechat
