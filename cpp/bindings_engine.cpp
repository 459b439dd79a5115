// Bindings of the KV cache, the decode step and prefill.
#include <memory>
#include <tuple>

#include "bindings_engine.h"
#include "common/status.h"
#include "cpu/threads.h"
#include "decode/step.h"
#include "kv/cache.h"
#include "prefill/prefill.h"

namespace py = pybind11;

namespace moechat {
namespace {

bool same_windows(const Model& model, const KVCache& cache) {
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer)
    if (cache.window(layer) != model.layers[static_cast<size_t>(layer)].window) return false;
  return true;
}

}  // namespace

void check_tokens(const Model& model, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    check(tokens[i] >= 0 && tokens[i] < model.dims.vocab, "a token id is outside the vocabulary");
}

void check_cache(const Model& model, const KVCache& cache) {
  check(cache.num_layers() == static_cast<int64_t>(model.layers.size()) &&
            cache.width() == model.dims.kv_width() &&
            cache.num_segments() == model.dims.kv_segments() && same_windows(model, cache) &&
            (cache.encoding() == KVEncoding::kF32) == (model.compute == Compute::kExact),
        "the KV cache belongs to another model or compute mode");
}

void check_holds(const KVCache& cache, int64_t position) {
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer)
    check(cache.end_position(layer) == position, "the cache must hold exactly the tokens before");
}

namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;
using FloatArray = py::array_t<float, py::array::c_style>;

// Slots in the cache's own element type: uint16 (BF16) or float32.
py::array encoded_slots(KVEncoding encoding, int64_t count, int64_t width) {
  const std::vector<py::ssize_t> shape{count, width};
  if (encoding == KVEncoding::kF32) return py::array_t<float>(shape);
  return py::array_t<uint16_t>(shape);
}

void check_span(const KVCache& cache, int64_t layer, int64_t begin, int64_t end) {
  check(layer >= 0 && layer < cache.num_layers(), "layer out of range");
  const int64_t aside = cache.aside_place(layer).first_slot;
  const bool kept_aside = begin >= aside && end <= aside + cache.num_aside_slots(layer);
  check(begin <= end && (kept_aside || (begin >= cache.first_slot(layer) &&
                                        end <= cache.num_slots(layer))),
        "slots out of range");
}

py::array read_slots(const KVCache& cache, int64_t layer, int64_t begin, int64_t end) {
  check_span(cache, layer, begin, end);
  py::array out = encoded_slots(cache.encoding(), end - begin, cache.width());
  auto* bytes = static_cast<uint8_t*>(out.mutable_data());
  for (int64_t slot = begin; slot < end; ++slot)
    cache.read(layer, slot, bytes + (slot - begin) * cache.slot_bytes());
  return out;
}

// The rows of slots, in one piece.
py::array check_slots(const KVCache& cache, int64_t layer, const IntArray& positions,
                      const py::array& rows) {
  check(layer >= 0 && layer < cache.num_layers(), "layer out of range");
  check(positions.ndim() == 1 && rows.ndim() == 2 && rows.shape(0) == positions.size() &&
            rows.shape(1) == cache.width(),
        "rows must be [positions, width]");
  const bool wide = cache.encoding() == KVEncoding::kF32;
  check(wide ? py::isinstance<py::array_t<float>>(rows) : py::isinstance<py::array_t<uint16_t>>(rows),
        "rows must be float32 (exact) or uint16 (BF16)");
  return py::array::ensure(rows, py::array::c_style);
}

void append_slots(KVCache& cache, int64_t layer, const IntArray& positions, const py::array& rows) {
  const py::array contiguous = check_slots(cache, layer, positions, rows);
  cache.append_encoded(layer, positions.data(), static_cast<const uint8_t*>(contiguous.data()),
                       positions.size());
}

using Place = std::tuple<int64_t, int64_t, int64_t>;

Place tuple_of(const KVPlace& place) { return {place.first_slot, place.begin, place.end}; }

void restore_slots(KVCache& cache, int64_t layer, const Place& tuple, const IntArray& positions,
                   const py::array& rows, bool aside) {
  const py::array contiguous = check_slots(cache, layer, positions, rows);
  const auto [first, begin, end] = tuple;
  check(first >= 0 && first % kPageSlots == 0 && first <= begin && begin <= end &&
            end <= INT32_MAX && (first == 0 || cache.window(layer) > 0),
        "the slots cannot stand there");
  const KVPlace place{first, begin, end};
  const auto* bytes = static_cast<const uint8_t*>(contiguous.data());
  const int64_t count = positions.size();
  if (aside) {
    check(count % kPageSlots == 0 && first + count <= cache.first_slot(layer),
          "whole pages are kept aside, before the others");
    cache.restore_aside(layer, place, positions.data(), bytes, count);
  } else {
    check(cache.num_slots(layer) == 0, "the layer holds slots");
    cache.restore(layer, place, positions.data(), bytes, count);
  }
}

std::vector<FloatArray> run_step(DecodeStep& step, const PyModel& model, const py::list& rows) {
  check(&step.model() == &model.model, "the step belongs to another model");
  // rows: (cache, tokens int32[k], position, how many of the last tokens' logits are wanted)
  std::vector<StepRow> step_rows;
  std::vector<IntArray> tokens;
  std::vector<FloatArray> logits;
  for (const py::handle& item : rows) {
    const auto row = item.cast<py::tuple>();
    KVCache& cache = row[0].cast<KVCache&>();
    tokens.push_back(row[1].cast<IntArray>());
    const IntArray& ids = tokens.back();
    const auto position = row[2].cast<int32_t>();
    check(ids.ndim() == 1 && ids.size() > 0, "a row needs at least one token");
    check_cache(model.model, cache);
    check_holds(cache, position);
    check(position <= INT32_MAX - ids.size(), "the positions do not fit 32 bits");
    check_tokens(model.model, ids.data(), ids.size());
    for (const StepRow& other : step_rows) check(other.cache != &cache, "two rows share a cache");
    const auto wanted = row[3].cast<int64_t>();
    check(wanted >= 0 && wanted <= ids.size(), "a row has no more logits than tokens");
    logits.push_back(FloatArray({static_cast<py::ssize_t>(wanted),
                                 static_cast<py::ssize_t>(model.model.dims.vocab)}));
    StepRow step_row{&cache, ids.data(), ids.size(), position};
    step_row.logits = wanted > 0 ? logits.back().mutable_data() : nullptr;
    step_row.num_logits = wanted;
    step_rows.push_back(step_row);
  }
  const py::gil_scoped_release release;
  step.run(step_rows, nullptr);
  return logits;
}

py::object run_prefill_layer(Prefill& prefill, const CancelFlag& cancel, int64_t window) {
  check(window >= 0, "the window cannot be negative");
  check(prefill.next_layer() < prefill.num_layers(), "all layers have run, or the prefill was cut");
  check(prefill.prefix_held(), "the cache no longer holds what the span follows");
  FloatArray mass(window > 0 ? prefill.num_keys() : 0);
  {
    const py::gil_scoped_release release;
    if (!prefill.run_layer(&cancel, window > 0 ? mass.mutable_data() : nullptr, window)) {
      const py::gil_scoped_acquire acquire;
      return py::none();
    }
  }
  py::array kv = encoded_slots(prefill.encoding(), prefill.num_tokens(), prefill.kv_width());
  std::memcpy(kv.mutable_data(), prefill.kv().data(), prefill.kv().size());
  return py::make_tuple(kv, window > 0 ? py::object(mass) : py::object(py::none()));
}

py::object prefill_logits(Prefill& prefill, const CancelFlag& cancel, int64_t first) {
  check(first >= 0 && first < prefill.num_tokens(), "first token out of range");
  check(prefill.next_layer() == prefill.num_layers(), "logits come after the last layer");
  FloatArray out({prefill.num_tokens() - first, prefill.vocab()});
  const py::gil_scoped_release release;
  const bool complete = prefill.logits(&cancel, first, out.mutable_data());
  const py::gil_scoped_acquire acquire;
  return complete ? py::object(out) : py::object(py::none());
}

}  // namespace

void register_engine(py::module_& m) {
  py::class_<CancelFlag>(m, "CancelFlag", "A request to stop; may be raised from any thread.")
      .def(py::init<>())
      .def("raise_", &CancelFlag::raise)
      .def("clear", &CancelFlag::clear)
      .def_property_readonly("raised", &CancelFlag::raised);

  py::class_<KVCache>(m, "KVCache", "One session's KV cache: pages of slots for every layer.")
      .def(py::init([](const std::vector<int64_t>& windows, int64_t width,
                       const std::string& compute, int64_t segments) {
             check(segments >= 1 && width % segments == 0, "segments must divide the width");
             return std::make_unique<KVCache>(windows, segments, width / segments,
                                              parse_compute(compute));
           }),
           py::arg("windows"), py::arg("width"), py::arg("compute"), py::arg("segments") = 1)
      .def_property_readonly("num_layers", &KVCache::num_layers)
      .def_property_readonly("width", &KVCache::width)
      .def_property_readonly("bytes", &KVCache::bytes)
      .def("first_slot",
           [](const KVCache& self, int64_t layer) {
             check(layer >= 0 && layer < self.num_layers(), "layer out of range");
             return self.first_slot(layer);
           })
      .def("num_slots",
           [](const KVCache& self, int64_t layer) {
             check(layer >= 0 && layer < self.num_layers(), "layer out of range");
             return self.num_slots(layer);
           })
      .def("end_position",
           [](const KVCache& self, int64_t layer) {
             check(layer >= 0 && layer < self.num_layers(), "layer out of range");
             return self.end_position(layer);
           })
      .def("num_aside_slots",
           [](const KVCache& self, int64_t layer) {
             check(layer >= 0 && layer < self.num_layers(), "layer out of range");
             return self.num_aside_slots(layer);
           })
      .def("place",
           [](const KVCache& self, int64_t layer, bool aside) {
             check(layer >= 0 && layer < self.num_layers(), "layer out of range");
             return tuple_of(aside ? self.aside_place(layer) : self.place(layer));
           },
           py::arg("layer"), py::arg("aside") = false)
      .def("restore", &restore_slots, py::arg("layer"), py::arg("place"), py::arg("positions"),
           py::arg("rows"), py::arg("aside") = false)
      .def("append", &append_slots, py::arg("layer"), py::arg("positions"), py::arg("rows"))
      .def("read", &read_slots, py::arg("layer"), py::arg("begin"), py::arg("end"))
      .def("positions",
           [](const KVCache& self, int64_t layer, int64_t begin, int64_t end) {
             check_span(self, layer, begin, end);
             IntArray out(end - begin);
             for (int64_t i = begin; i < end; ++i) out.mutable_data()[i - begin] = self.position(layer, i);
             return out;
           },
           py::arg("layer"), py::arg("begin"), py::arg("end"))
      .def("settle", &KVCache::settle)
      .def("mark", &KVCache::mark, py::arg("position"))
      .def("truncate", &KVCache::truncate, py::arg("position"));

  py::class_<DecodeStep>(m, "DecodeStep", "Decode steps of one model on one pool.")
      .def(py::init([](const PyModel& model, ThreadPool& pool) {
             return std::make_unique<DecodeStep>(model.model, pool);
           }),
           py::arg("model"), py::arg("pool"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("run", &run_step, py::arg("model"), py::arg("rows"));

  py::class_<Prefill>(m, "Prefill", "One span of new tokens on its way through the layers.")
      .def(py::init([](const PyModel& model, ThreadPool& pool, const KVCache& cache,
                       const IntArray& tokens, int64_t first_position) {
             check(tokens.ndim() == 1 && tokens.size() > 0, "prefill needs at least one token");
             check_tokens(model.model, tokens.data(), tokens.size());
             check_cache(model.model, cache);
             check_holds(cache, first_position);
             check(first_position <= INT32_MAX - tokens.size(), "the positions do not fit 32 bits");
             std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
             const py::gil_scoped_release release;
             return std::make_unique<Prefill>(model.model, pool, cache, std::move(ids),
                                              first_position);
           }),
           py::arg("model"), py::arg("pool"), py::arg("cache"), py::arg("tokens"),
           py::arg("first_position"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>())
      .def("run_layer", &run_prefill_layer, py::arg("cancel"), py::arg("window") = 0)
      .def("logits", &prefill_logits, py::arg("cancel"), py::arg("first"))
      .def("draft",
           [](Prefill& self, const PyModel& model, const KVCache& cache, int32_t next_token,
              const CancelFlag& cancel) {
             check(self.next_layer() == self.num_layers(), "drafts come after the last layer");
             check(model.model.draft != nullptr && self.is_of(model.model),
                   "the model has no multi-token-prediction layer");
             check_cache(*model.model.draft, cache);
             check(next_token >= -1 && next_token < model.model.dims.vocab,
                   "a token id is outside the vocabulary");
             const py::gil_scoped_release release;
             return self.draft(cache, next_token, &cancel);
           },
           py::arg("model"), py::arg("cache"), py::arg("next_token"), py::arg("cancel"),
           py::keep_alive<0, 1>(), py::keep_alive<0, 3>())
      .def_property_readonly("first_position", &Prefill::first_position)
      .def_property_readonly("num_tokens", &Prefill::num_tokens)
      .def_property_readonly("next_layer", &Prefill::next_layer)
      .def_property_readonly("router_ids",
                             [](const Prefill& self) {
                               const auto rows = static_cast<py::ssize_t>(self.num_tokens());
                               const auto size = static_cast<py::ssize_t>(self.router_ids().size());
                               IntArray out({rows, size / rows});
                               std::copy(self.router_ids().begin(), self.router_ids().end(),
                                         out.mutable_data());
                               return out;
                             })
      .def_property_readonly("hidden", [](const Prefill& self) {
        const auto rows = static_cast<py::ssize_t>(self.num_tokens());
        FloatArray out({rows, static_cast<py::ssize_t>(self.hidden().size()) / rows});
        std::copy(self.hidden().begin(), self.hidden().end(), out.mutable_data());
        return out;
      });
}

}  // namespace moechat
