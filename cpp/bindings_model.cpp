// Binding of Model: takes dimensions and weights by role, checks every shape before a kernel sees it.
#include <string>

#include "bindings.h"
#include "common/status.h"
#include "model/model.h"

namespace py = pybind11;

namespace moechat {
namespace {

// Looks weights up by role ("layers.3.q_a") and checks their shapes.
class Weights {
 public:
  explicit Weights(const py::dict& weights) : weights_(weights) {}

  bool has(const std::string& role) const { return weights_.contains(role.c_str()); }

  MatrixView matrix(const std::string& role, int64_t rows, int64_t cols) const {
    const MatrixView view = get(role).cast<const PyMatrixView&>().view;
    if (view.rows != rows || view.cols != cols)
      throw Status("bad-argument", "weight '" + role + "' is " + shape(view.rows, view.cols) +
                                       ", the dimensions ask for " + shape(rows, cols));
    return view;
  }

  // Norm weights and biases: small, read once as float32.
  std::vector<float> vector(const std::string& role, int64_t size) const {
    const auto array = get(role).cast<py::array_t<float, py::array::c_style>>();
    if (array.ndim() != 1 || array.size() != size)
      throw Status("bad-argument", "weight '" + role + "' needs " + std::to_string(size) + " values");
    return {array.data(), array.data() + size};
  }

  MlpWeights mlp(const std::string& prefix, int64_t hidden) const {
    const int64_t inner = get(prefix + "gate").cast<const PyMatrixView&>().view.rows;
    return {matrix(prefix + "gate", inner, hidden), matrix(prefix + "up", inner, hidden),
            matrix(prefix + "down", hidden, inner)};
  }

 private:
  static std::string shape(int64_t rows, int64_t cols) {
    return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
  }
  py::object get(const std::string& role) const {
    if (!has(role)) throw Status("bad-argument", "weight '" + role + "' is missing");
    return weights_[role.c_str()];
  }
  const py::dict& weights_;
};

ModelDims read_dims(const py::dict& d) {
  const auto integer = [&d](const char* key) { return d[key].cast<int64_t>(); };
  const auto real = [&d](const char* key) { return d[key].cast<float>(); };
  ModelDims dims;
  dims.hidden = integer("hidden_size");
  dims.vocab = integer("vocab_size");
  dims.num_heads = integer("num_heads");
  dims.q_lora_rank = integer("q_lora_rank");
  dims.kv_lora_rank = integer("kv_lora_rank");
  dims.nope_dim = integer("qk_nope_head_dim");
  dims.rope_dim = integer("qk_rope_head_dim");
  dims.v_dim = integer("v_head_dim");
  dims.num_experts = integer("num_experts");
  dims.experts_per_token = integer("num_experts_per_token");
  dims.num_groups = integer("num_groups");
  dims.groups_kept = integer("num_groups_kept");
  dims.normalise_weights = d["normalise_weights"].cast<bool>();
  dims.routed_scaling = real("routed_scaling");
  dims.rms_eps = real("rms_norm_eps");
  dims.latent_eps = real("latent_norm_eps");
  dims.softmax_scale = real("softmax_scale");
  dims.rope_amplitude = real("rope_amplitude");
  const int64_t sizes[] = {dims.hidden, dims.vocab, dims.num_heads, dims.kv_lora_rank,
                           dims.nope_dim, dims.rope_dim, dims.v_dim, dims.num_groups};
  for (const int64_t size : sizes)
    if (size <= 0) throw Status("bad-argument", "every dimension must be positive");
  if (dims.rope_dim % 2 != 0) throw Status("bad-argument", "qk_rope_head_dim must be even");
  if (dims.num_experts < 0 || dims.experts_per_token < 0 || dims.q_lora_rank < 0 ||
      dims.num_experts % dims.num_groups != 0 || dims.groups_kept > dims.num_groups ||
      dims.experts_per_token > dims.num_experts / dims.num_groups * dims.groups_kept)
    throw Status("bad-argument", "experts, groups and experts per token do not fit together");
  return dims;
}

LayerWeights read_layer(const Weights& weights, const ModelDims& d, const std::string& prefix) {
  LayerWeights layer;
  layer.attention_norm = weights.vector(prefix + "attention_norm", d.hidden);
  layer.ffn_norm = weights.vector(prefix + "ffn_norm", d.hidden);
  AttentionWeights& attention = layer.attention;
  const int64_t query_width = d.num_heads * d.qk_dim();
  if (d.q_lora_rank > 0) {
    attention.q_a = weights.matrix(prefix + "q_a", d.q_lora_rank, d.hidden);
    attention.q_a_norm = weights.vector(prefix + "q_a_norm", d.q_lora_rank);
    attention.q_b = weights.matrix(prefix + "q_b", query_width, d.q_lora_rank);
  } else {
    attention.q_b = weights.matrix(prefix + "q", query_width, d.hidden);
  }
  attention.kv_a = weights.matrix(prefix + "kv_a", d.kv_width(), d.hidden);
  attention.kv_a_norm = weights.vector(prefix + "kv_a_norm", d.kv_lora_rank);
  attention.kv_b = weights.matrix(prefix + "kv_b", d.num_heads * (d.nope_dim + d.v_dim), d.kv_lora_rank);
  attention.o = weights.matrix(prefix + "o", d.hidden, d.num_heads * d.v_dim);
  layer.is_moe = weights.has(prefix + "router");
  if (!layer.is_moe) {
    layer.dense = weights.mlp(prefix, d.hidden);
    return layer;
  }
  layer.router = weights.matrix(prefix + "router", d.num_experts, d.hidden);
  layer.router_bias = weights.vector(prefix + "router_bias", d.num_experts);
  if (!all_finite(layer.router_bias.data(), d.num_experts))
    throw Status("bad-argument", "weight '" + prefix + "router_bias' holds NaN or infinity");
  layer.has_shared = weights.has(prefix + "shared.gate");
  if (layer.has_shared) layer.shared = weights.mlp(prefix + "shared.", d.hidden);
  for (int64_t e = 0; e < d.num_experts; ++e)
    layer.experts.push_back(weights.mlp(prefix + "experts." + std::to_string(e) + ".", d.hidden));
  return layer;
}

Model read_model(const py::dict& dims, const std::vector<float>& rope_inverse_frequencies,
                 int64_t num_layers, const std::string& compute, const py::dict& by_role) {
  const Weights weights(by_role);
  Model model;
  model.dims = read_dims(dims);
  model.compute = parse_compute(compute);
  model.rope_inverse_frequencies = rope_inverse_frequencies;
  if (static_cast<int64_t>(rope_inverse_frequencies.size()) != model.dims.rope_dim / 2)
    throw Status("bad-argument", "rope_inverse_frequencies needs qk_rope_head_dim / 2 values");
  model.embedding = weights.matrix("embedding", model.dims.vocab, model.dims.hidden);
  model.head = weights.has("head") ? weights.matrix("head", model.dims.vocab, model.dims.hidden)
                                   : model.embedding;
  model.final_norm = weights.vector("final_norm", model.dims.hidden);
  if (num_layers <= 0) throw Status("bad-argument", "a model needs at least one layer");
  for (int64_t i = 0; i < num_layers; ++i)
    model.layers.push_back(read_layer(weights, model.dims, "layers." + std::to_string(i) + "."));
  return model;
}

}  // namespace

Compute parse_compute(const std::string& name) {
  if (name == "bf16") return Compute::kBF16;
  if (name == "exact") return Compute::kExact;
  throw Status("bad-argument", "compute is 'bf16' or 'exact', not '" + name + "'");
}

void register_model(py::module_& m) {
  py::class_<PyModel>(m, "Model", "Dimensions and weight views of one model, by role.")
      .def(py::init([](const py::dict& dims, const std::vector<float>& rope_inverse_frequencies,
                       int64_t num_layers, const std::string& compute, py::dict weights) {
             return PyModel{read_model(dims, rope_inverse_frequencies, num_layers, compute, weights),
                            weights};
           }),
           py::arg("dims"), py::arg("rope_inverse_frequencies"), py::arg("num_layers"),
           py::arg("compute"), py::arg("weights"))
      .def_property_readonly("num_layers",
                             [](const PyModel& self) { return self.model.layers.size(); });
}

}  // namespace moechat
