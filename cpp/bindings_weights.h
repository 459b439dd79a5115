// Weights by role ("layers.3.q_a"), with their shapes checked as they are looked up.
#pragma once
#include <string>
#include <vector>

#include "bindings.h"

namespace moechat {

class Weights {
 public:
  explicit Weights(const pybind11::dict& weights) : weights_(weights) {}

  bool has(const std::string& role) const { return weights_.contains(role.c_str()); }

  MatrixView matrix(const std::string& role, int64_t outputs, int64_t inputs) const {
    const MatrixView view = get(role).cast<const PyMatrixView&>().view;
    if (view.outputs() != outputs || view.inputs() != inputs)
      throw Status("bad-argument", "weight '" + role + "' is " +
                                       shape(view.outputs(), view.inputs()) +
                                       ", the dimensions ask for " + shape(outputs, inputs));
    return view;
  }

  // Norm weights and biases: small, read once as float32.
  std::vector<float> vector(const std::string& role, int64_t size) const {
    std::vector<float> values = optional(role, size);
    if (values.empty()) throw Status("bad-argument", "weight '" + role + "' is missing");
    return values;
  }

  // Empty when there is none; otherwise of either size.
  std::vector<float> optional(const std::string& role, int64_t size, int64_t other = 0) const {
    if (!has(role)) return {};
    const auto array =
        get(role).cast<pybind11::array_t<float, pybind11::array::c_style>>();
    if (array.ndim() != 1 || (array.size() != size && (other == 0 || array.size() != other)))
      throw Status("bad-argument",
                   "weight '" + role + "' needs " + std::to_string(size) + " values");
    return {array.data(), array.data() + array.size()};
  }

  MlpWeights mlp(const std::string& prefix, int64_t hidden) const {
    const int64_t inner = get(prefix + "gate").cast<const PyMatrixView&>().view.outputs();
    return {matrix(prefix + "gate", inner, hidden),  matrix(prefix + "up", inner, hidden),
            matrix(prefix + "down", hidden, inner),  optional(prefix + "gate_bias", inner),
            optional(prefix + "up_bias", inner),     optional(prefix + "down_bias", hidden)};
  }

 private:
  static std::string shape(int64_t outputs, int64_t inputs) {
    return "[" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]";
  }
  pybind11::object get(const std::string& role) const {
    if (!has(role)) throw Status("bad-argument", "weight '" + role + "' is missing");
    return weights_[role.c_str()];
  }
  const pybind11::dict& weights_;
};

}  // namespace moechat
