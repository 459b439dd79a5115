// Binding of Model: takes dimensions and weights by role, checks every shape before a kernel sees it.
#include <string>

#include "bindings.h"
#include "bindings_weights.h"
#include "common/status.h"
#include "model/model.h"

namespace py = pybind11;

namespace moechat {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 24;  // products of three sizes cannot overflow

// One named field after another of a dict.
class Fields {
 public:
  explicit Fields(const py::dict& values) : values_(values) {}
  int64_t size(const char* key) const {
    const auto value = values_[key].cast<int64_t>();
    check(value >= 0 && value <= kMaxSize, "a dimension must lie in 0..2^24");
    return value;
  }
  float real(const char* key) const { return values_[key].cast<float>(); }
  bool flag(const char* key) const { return values_[key].cast<bool>(); }
  std::string text(const char* key) const { return values_[key].cast<std::string>(); }

 private:
  const py::dict& values_;
};

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "swiglu_clamped") return Activation::kSwigluClamped;
  throw Status("bad-argument", "there is no activation '" + name + "'");
}

void check_dims(const ModelDims& d) {
  check(d.hidden > 0 && d.vocab > 0 && d.num_heads > 0, "every dimension must be positive");
  if (d.latent()) {
    check(d.nope_dim > 0 && d.rope_dim > 0 && d.rope_dim % 2 == 0 && d.v_dim > 0,
          "the head dimensions must be positive, the rotated one even");
  } else {
    check(d.num_kv_heads > 0 && d.head_dim > 0, "every dimension must be positive");
    check(d.num_heads % d.num_kv_heads == 0, "num_kv_heads must divide num_heads");
  }
  check(d.num_groups > 0 && d.num_experts % d.num_groups == 0 && d.groups_kept > 0 &&
            d.groups_kept <= d.num_groups &&
            d.experts_per_token <= d.num_experts / d.num_groups * d.groups_kept,
        "experts, groups and experts per token do not fit together");
}

ModelDims read_dims(const py::dict& values) {
  const Fields d(values);
  ModelDims dims;
  dims.hidden = d.size("hidden_size");
  dims.vocab = d.size("vocab_size");
  dims.num_heads = d.size("num_heads");
  dims.q_lora_rank = d.size("q_lora_rank");
  dims.kv_lora_rank = d.size("kv_lora_rank");
  dims.nope_dim = d.size("nope_dim");
  dims.rope_dim = d.size("rope_dim");
  dims.v_dim = d.size("v_dim");
  dims.latent_eps = d.real("latent_norm_eps");
  dims.num_kv_heads = d.size("num_kv_heads");
  dims.head_dim = d.size("head_dim");
  dims.qkv_clip = d.real("qkv_clip");
  dims.softmax_scale = d.real("softmax_scale");
  dims.attention_softcap = d.real("attention_softcap");
  dims.final_softcap = d.real("final_softcap");
  dims.rms_eps = d.real("rms_norm_eps");
  dims.embedding_scale = d.real("embedding_scale");
  dims.activation = parse_activation(d.text("activation"));
  dims.activation_limit = d.real("activation_limit");
  dims.activation_alpha = d.real("activation_alpha");
  dims.num_experts = d.size("num_experts");
  dims.experts_per_token = d.size("num_experts_per_token");
  dims.num_groups = d.size("num_groups");
  dims.groups_kept = d.size("num_groups_kept");
  dims.scoring = parse_scoring(d.text("scoring"));
  dims.normalise_weights = d.flag("normalise_weights");
  dims.routed_scaling = d.real("routed_scaling");
  check_dims(dims);
  return dims;
}

LatentWeights read_latent(const Weights& weights, const ModelDims& d, const std::string& prefix) {
  LatentWeights latent;
  const int64_t query_width = d.num_heads * d.query_dim();
  if (d.q_lora_rank > 0) {
    latent.q_a = weights.matrix(prefix + "q_a", d.q_lora_rank, d.hidden);
    latent.q_a_norm = weights.vector(prefix + "q_a_norm", d.q_lora_rank);
    latent.q_b = weights.matrix(prefix + "q_b", query_width, d.q_lora_rank);
  } else {
    latent.q_b = weights.matrix(prefix + "q", query_width, d.hidden);
  }
  latent.kv_a = weights.matrix(prefix + "kv_a", d.kv_width(), d.hidden);
  latent.kv_a_norm = weights.vector(prefix + "kv_a_norm", d.kv_lora_rank);
  if (weights.has(prefix + "kv_b")) {
    // Rows of head h: nope_dim rows of the key expansion, then v_dim rows of the value expansion.
    const int64_t rows = d.nope_dim + d.v_dim;
    const MatrixView kv_b = weights.matrix(prefix + "kv_b", d.num_heads * rows, d.kv_lora_rank);
    const int64_t unit = cut_of(kv_b.format);
    check(!kv_b.transposed || (d.nope_dim % unit == 0 && d.v_dim % unit == 0),
          "kv_b is packed across the edges of its heads");
    const auto outputs = [&kv_b](int64_t begin, int64_t count) {
      return kv_b.transposed ? kv_b.col_slice(begin, count) : kv_b.row_slice(begin, count);
    };
    for (int64_t h = 0; h < d.num_heads; ++h) {
      latent.key_expand.push_back(outputs(h * rows, d.nope_dim));
      latent.value_expand.push_back(outputs(h * rows + d.nope_dim, d.v_dim));
    }
    return latent;
  }
  for (int64_t h = 0; h < d.num_heads; ++h) {
    const std::string head = std::to_string(h);
    latent.key_expand.push_back(weights.matrix(prefix + "k_b." + head, d.nope_dim, d.kv_lora_rank));
    latent.value_expand.push_back(weights.matrix(prefix + "v_b." + head, d.v_dim, d.kv_lora_rank));
  }
  return latent;
}

GroupedWeights read_grouped(const Weights& weights, const ModelDims& d, const std::string& prefix) {
  GroupedWeights grouped;
  const int64_t query_width = d.num_heads * d.head_dim, key_width = d.num_kv_heads * d.head_dim;
  grouped.q = weights.matrix(prefix + "q", query_width, d.hidden);
  grouped.k = weights.matrix(prefix + "k", key_width, d.hidden);
  grouped.v = weights.matrix(prefix + "v", key_width, d.hidden);
  grouped.q_bias = weights.optional(prefix + "q_bias", query_width);
  grouped.k_bias = weights.optional(prefix + "k_bias", key_width);
  grouped.v_bias = weights.optional(prefix + "v_bias", key_width);
  grouped.q_norm = weights.optional(prefix + "q_norm", d.head_dim, query_width);
  grouped.k_norm = weights.optional(prefix + "k_norm", d.head_dim, key_width);
  return grouped;
}

void read_moe(const Weights& weights, const ModelDims& d, const std::string& prefix,
              LayerWeights& layer) {
  layer.router = weights.matrix(prefix + "router", d.num_experts, d.hidden);
  layer.router_bias = weights.optional(prefix + "router_bias", d.num_experts);
  layer.router_correction = weights.optional(prefix + "router_correction", d.num_experts);
  if (!all_finite(layer.router_correction.data(),
                  static_cast<int64_t>(layer.router_correction.size())))
    throw Status("bad-argument", "weight '" + prefix + "router_correction' holds NaN or infinity");
  layer.has_shared = weights.has(prefix + "shared.gate");
  if (layer.has_shared) layer.shared = weights.mlp(prefix + "shared.", d.hidden);
  if (weights.has(prefix + "shared_gate"))
    layer.shared_gate = weights.matrix(prefix + "shared_gate", 1, d.hidden);
  for (int64_t e = 0; e < d.num_experts; ++e)
    layer.experts.push_back(weights.mlp(prefix + "experts." + std::to_string(e) + ".", d.hidden));
}

LayerWeights read_layer(const Weights& weights, const ModelDims& d, const std::string& prefix) {
  LayerWeights layer;
  layer.attention_norm = weights.vector(prefix + "attention_norm", d.hidden);
  layer.ffn_norm = weights.vector(prefix + "ffn_norm", d.hidden);
  layer.post_attention_norm = weights.optional(prefix + "post_attention_norm", d.hidden);
  layer.post_ffn_norm = weights.optional(prefix + "post_ffn_norm", d.hidden);
  if (d.latent())
    layer.latent = read_latent(weights, d, prefix);
  else
    layer.grouped = read_grouped(weights, d, prefix);
  layer.o = weights.matrix(prefix + "o", d.hidden, d.num_heads * d.value_dim());
  layer.o_bias = weights.optional(prefix + "o_bias", d.hidden);
  layer.sinks = weights.optional(prefix + "sinks", d.num_heads);
  layer.is_moe = weights.has(prefix + "router");
  if (layer.is_moe)
    read_moe(weights, d, prefix, layer);
  else
    layer.dense = weights.mlp(prefix, d.hidden);
  return layer;
}

// The multi-token-prediction layer: a model of one layer that shares the main one's embedding and
// head, unless it has its own.
Model read_draft(const Weights& weights, const Model& main) {
  const ModelDims& d = main.dims;
  Model draft;
  draft.dims = d;
  draft.compute = main.compute;
  draft.ropes = main.ropes;
  draft.embedding = weights.has("draft.embedding")
                        ? weights.matrix("draft.embedding", d.vocab, d.hidden)
                        : main.embedding;
  check(!draft.embedding.transposed, "the embedding must be stored a row a token");
  draft.head =
      weights.has("draft.head") ? weights.matrix("draft.head", d.vocab, d.hidden) : main.head;
  draft.final_norm = weights.vector("draft.final_norm", d.hidden);
  draft.layers.push_back(read_layer(weights, d, "draft."));
  draft.layers[0].rope = main.layers.back().rope;
  draft.input = {weights.vector("draft.token_norm", d.hidden),
                 weights.vector("draft.hidden_norm", d.hidden),
                 weights.matrix("draft.projection", d.hidden, 2 * d.hidden)};
  return draft;
}

std::vector<Rope> read_ropes(const py::list& ropes, const ModelDims& d) {
  check(!ropes.empty(), "a model needs at least one rope");
  std::vector<Rope> result;
  for (const py::handle& item : ropes) {
    const auto rope = item.cast<py::tuple>();
    result.push_back(
        {rope[0].cast<std::vector<float>>(), rope[1].cast<float>(), rope[2].cast<bool>()});
    const int64_t pairs = result.back().pairs();
    check(pairs == result[0].pairs(), "all ropes need the same number of pairs");
    check(pairs >= 1 && (d.latent() ? 2 * pairs == d.rope_dim : 2 * pairs <= d.head_dim),
          "a rope needs one frequency for each rotated pair");
  }
  return result;
}

// layers: (window, rope) of each. ropes: (frequencies, amplitude, interleaved) of each.
Model read_model(const py::dict& dims, const py::list& ropes, const py::list& layers,
                 const std::string& compute, const py::dict& by_role) {
  const Weights weights(by_role);
  Model model;
  model.dims = read_dims(dims);
  model.compute = parse_compute(compute);
  model.ropes = read_ropes(ropes, model.dims);
  model.embedding = weights.matrix("embedding", model.dims.vocab, model.dims.hidden);
  check(!model.embedding.transposed, "the embedding must be stored a row a token");
  model.head = weights.has("head") ? weights.matrix("head", model.dims.vocab, model.dims.hidden)
                                   : model.embedding;
  model.final_norm = weights.vector("final_norm", model.dims.hidden);
  check(!layers.empty(), "a model needs at least one layer");
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = layers[i].cast<py::tuple>();
    model.layers.push_back(
        read_layer(weights, model.dims, "layers." + std::to_string(i) + "."));
    model.layers.back().window = layer[0].cast<int64_t>();
    model.layers.back().rope = layer[1].cast<int64_t>();
    check(model.layers.back().window >= 0 && model.layers.back().window <= INT32_MAX,
          "a window must lie in 0..2^31 - 1");
    check(model.layers.back().rope >= 0 &&
              model.layers.back().rope < static_cast<int64_t>(model.ropes.size()),
          "a layer asks for a rope that is not there");
  }
  if (weights.has("draft.projection"))
    model.draft = std::make_shared<Model>(read_draft(weights, model));
  return model;
}

}  // namespace

Compute parse_compute(const std::string& name) {
  if (name == "bf16") return Compute::kBF16;
  if (name == "exact") return Compute::kExact;
  throw Status("bad-argument", "compute is 'bf16' or 'exact', not '" + name + "'");
}

Scoring parse_scoring(const std::string& name) {
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "softmax_chosen") return Scoring::kSoftmaxChosen;
  throw Status("bad-argument", "there is no scoring '" + name + "'");
}

void register_model(py::module_& m) {
  py::class_<PyModel>(m, "Model", "Dimensions and weight views of one model, by role.")
      .def(py::init([](const py::dict& dims, const py::list& ropes, const py::list& layers,
                       const std::string& compute, py::dict weights) {
             // A copy: whoever changes the dict later must not free what the views point into.
             const py::dict kept = weights.attr("copy")();
             return PyModel{read_model(dims, ropes, layers, compute, kept), kept};
           }),
           py::arg("dims"), py::arg("ropes"), py::arg("layers"), py::arg("compute"),
           py::arg("weights"))
      .def_property_readonly("num_layers",
                             [](const PyModel& self) { return self.model.layers.size(); });
}

}  // namespace moechat
