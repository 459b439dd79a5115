// Binding of the small kernels (vector, router, rope), for tests and measurements.
#include <string>
#include <utility>
#include <vector>

#include "bindings_kernels.h"
#include "cpu/dispatch.h"
#include "kernels/rope/rope.h"
#include "kernels/router/router.h"

namespace py = pybind11;

namespace moechat {
namespace {

using Floats = py::array_t<float>;

// Address and length of a contiguous float32 vector that is used in place.
std::pair<const float*, int64_t> vector_of(const py::array& array) {
  check(is_type(array, 'f', 4) && array.ndim() == 1 &&
            (array.size() < 2 || array.strides(0) == 4) &&
            reinterpret_cast<uintptr_t>(array.data()) % 4 == 0,
        "a contiguous float32 vector is needed");
  return {static_cast<const float*>(array.data()), array.size()};
}

const VectorKernels& kernels() { return *active_instruction_set().vector; }

Floats rms_norm(const py::array& x, const py::array& weight, float eps) {
  const auto [values, n] = vector_of(x);
  const auto [weights, num_weights] = vector_of(weight);
  check(n >= 1 && n == num_weights, "x and weight need the same size, at least 1");
  Floats y(n);
  kernels().rms_norm(values, weights, eps, n, y.mutable_data());
  return y;
}

// y = f(gate, up, ...) for the gated activations.
template <typename Function>
Floats gated(const py::array& gate, const py::array& up, const Function& function) {
  const auto [gates, n] = vector_of(gate);
  const auto [ups, num_ups] = vector_of(up);
  check(n == num_ups, "gate and up need the same size");
  Floats y(n);
  function(gates, ups, n, y.mutable_data());
  return y;
}

Floats gelu_tanh_mul(const py::array& gate, const py::array& up) {
  return gated(gate, up, kernels().gelu_tanh_mul);
}

Floats swiglu_clamped(const py::array& gate, const py::array& up, float limit, float alpha) {
  return gated(gate, up, [=](const float* g, const float* u, int64_t n, float* y) {
    kernels().swiglu_clamped(g, u, limit, alpha, n, y);
  });
}

Floats softcap(const py::array& x, float cap) {
  const auto [values, n] = vector_of(x);
  check(cap > 0, "the cap must be positive");
  Floats y(n, values);
  kernels().softcap(y.mutable_data(), cap, n);
  return y;
}

Floats silu_mul(const py::array& gate, const py::array& up) {
  return gated(gate, up, kernels().silu_mul);
}

std::pair<Floats, float> exp_sum(const py::array& x, float shift) {
  const auto [values, n] = vector_of(x);
  Floats y(n, values);
  const float sum = kernels().exp_sum(y.mutable_data(), shift, n);
  return {y, sum};
}

float max_of(const py::array& x) {
  const auto [values, n] = vector_of(x);
  return kernels().max(values, n);
}

py::array_t<uint16_t> to_bf16(const py::array& x) {
  const auto [values, n] = vector_of(x);
  py::array_t<uint16_t> y(n);
  kernels().to_bf16(values, n, y.mutable_data());
  return y;
}

std::pair<py::array_t<int32_t>, Floats> route_token(
    const py::array& logits, const py::object& correction, const std::string& scoring,
    int64_t experts_per_token, int64_t num_groups, int64_t groups_kept, bool normalise_weights,
    float routed_scaling) {
  const auto [values, num_experts] = vector_of(logits);
  const float* corrections = nullptr;
  if (!correction.is_none()) {
    const auto [data, size] = vector_of(correction.cast<py::array>());
    check(num_experts == size, "logits and correction need the same size");
    corrections = data;
  }
  check(num_experts >= 1, "a router needs at least one expert");
  check(num_groups >= 1 && num_experts % num_groups == 0, "groups must divide the experts");
  check(groups_kept >= 1 && groups_kept <= num_groups, "groups_kept must lie in 1..num_groups");
  check(experts_per_token >= 1 && experts_per_token <= num_experts / num_groups * groups_kept,
        "the groups kept hold fewer experts than are chosen");
  for (int64_t e = 0; e < num_experts; ++e)
    check(corrections == nullptr || corrections[e] - corrections[e] == 0,
          "the correction must be finite");
  const RouterRule rule = {num_experts, experts_per_token, num_groups,
                           groups_kept, parse_scoring(scoring), normalise_weights, routed_scaling};
  std::vector<float> scratch(2 * num_experts + num_groups);
  py::array_t<int32_t> ids(experts_per_token);
  Floats weights(experts_per_token);
  route(rule, values, corrections, scratch.data(), ids.mutable_data(), weights.mutable_data());
  return {ids, weights};
}

Floats rope(const py::array& x, int64_t position, const py::array& inverse_frequencies,
            float amplitude, bool interleaved) {
  const auto [values, n] = vector_of(x);
  const auto [frequencies, pairs] = vector_of(inverse_frequencies);
  check(n == 2 * pairs, "x needs two values for each frequency");
  std::vector<float> cos_sin(n);
  rope_angles(position, frequencies, pairs, amplitude, cos_sin.data());
  Floats y(n, values);
  rope_rotate(cos_sin.data(), pairs, interleaved, y.mutable_data());
  return y;
}

}  // namespace

void register_vector_kernels(py::module_& m) {
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"));
  m.def("silu_mul", &silu_mul, py::arg("gate"), py::arg("up"));
  m.def("gelu_tanh_mul", &gelu_tanh_mul, py::arg("gate"), py::arg("up"));
  m.def("swiglu_clamped", &swiglu_clamped, py::arg("gate"), py::arg("up"), py::arg("limit"),
        py::arg("alpha"));
  m.def("softcap", &softcap, "cap * tanh(x / cap).", py::arg("x"), py::arg("cap"));
  m.def("exp_sum", &exp_sum, "exp(x - shift), and its sum.", py::arg("x"), py::arg("shift"));
  m.def("max", &max_of, "Largest element; NaN if there is one.", py::arg("x"));
  m.def("to_bf16", &to_bf16, "Bits of x rounded to BF16.", py::arg("x"));
  m.def("route", &route_token, "Expert ids and weights of one token.", py::arg("logits"),
        py::arg("correction"), py::arg("scoring"), py::arg("experts_per_token"), py::arg("num_groups"),
        py::arg("groups_kept"), py::arg("normalise_weights"), py::arg("routed_scaling"));
  m.def("rope", &rope, "x rotated to a position, pairs (0, 1), (2, 3), ... or (0, n), (1, n + 1), ...", py::arg("x"),
        py::arg("position"), py::arg("inverse_frequencies"), py::arg("amplitude"),
        py::arg("interleaved") = true);
}

}  // namespace moechat
