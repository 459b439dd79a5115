// A decode step allocates nothing once it has run: counted by the sanitizer's allocation hook.
#include <atomic>
#include <deque>
#include <random>
#include <vector>

#include "check.h"
#include "common/number_formats.h"
#include "cpu/threads.h"
#include "decode/step.h"
#include "kv/cache.h"
#include "model/model.h"
#include "model/resident.h"

// Of the sanitizer's runtime library; its header is not installed everywhere.
extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*allocated)(const volatile void*, size_t), void (*freed)(const volatile void*));

namespace {

using namespace moechat;

std::atomic<int64_t> allocations{0};

void count_allocation(const volatile void*, size_t) { ++allocations; }
void ignore_free(const volatile void*) {}

// Matrices and norms of random BF16 and float32 values.
class Values {
 public:
  MatrixView matrix(int64_t rows, int64_t cols) {
    std::vector<uint16_t>& stored = matrices_.emplace_back();
    for (int64_t i = 0; i < rows * cols; ++i)
      stored.push_back(f32_to_bf16(0.05f * static_cast<float>(random_() % 2001) / 1000 - 0.05f));
    MatrixView view;
    view.format = Format::kBF16;
    view.data = reinterpret_cast<const uint8_t*>(stored.data());
    view.rows = rows;
    view.cols = cols;
    view.row_stride_bytes = 2 * cols;
    return view;
  }
  MlpWeights mlp(int64_t hidden, int64_t inner) {
    MlpWeights weights;
    weights.gate = matrix(inner, hidden);
    weights.up = matrix(inner, hidden);
    weights.down = matrix(hidden, inner);
    return weights;
  }

 private:
  std::deque<std::vector<uint16_t>> matrices_;
  std::minstd_rand random_{1};
};

Model make_model(Values& values, bool latent) {
  Model model;
  ModelDims& d = model.dims;
  d.hidden = 64;
  d.vocab = 128;
  d.num_heads = 2;
  d.num_experts = 8;
  d.experts_per_token = 3;
  if (latent) {
    d.q_lora_rank = 32;
    d.kv_lora_rank = 32;
    d.nope_dim = d.rope_dim = d.v_dim = 32;
  } else {
    d.num_kv_heads = 1;
    d.head_dim = 32;
  }
  model.embedding = model.head = values.matrix(d.vocab, d.hidden);
  const std::vector<float> ones(64, 1.0f);
  model.final_norm = ones;
  model.ropes.push_back({std::vector<float>(16, 0.1f), 1.0f, false});
  for (int i = 0; i < 2; ++i) {
    LayerWeights& layer = model.layers.emplace_back();
    layer.attention_norm = layer.ffn_norm = ones;
    if (latent) {
      layer.latent.q_a = values.matrix(d.q_lora_rank, d.hidden);
      layer.latent.q_b = values.matrix(d.num_heads * d.query_dim(), d.q_lora_rank);
      layer.latent.kv_a = values.matrix(d.kv_width(), d.hidden);
      layer.latent.q_a_norm.assign(32, 1.0f);
      layer.latent.kv_a_norm.assign(32, 1.0f);
      for (int h = 0; h < 2; ++h) {
        layer.latent.key_expand.push_back(values.matrix(d.nope_dim, d.kv_lora_rank));
        layer.latent.value_expand.push_back(values.matrix(d.v_dim, d.kv_lora_rank));
      }
    } else {
      layer.grouped.q = values.matrix(d.num_heads * d.head_dim, d.hidden);
      layer.grouped.k = values.matrix(d.head_dim, d.hidden);
      layer.grouped.v = values.matrix(d.head_dim, d.hidden);
    }
    layer.o = values.matrix(d.hidden, d.num_heads * d.value_dim());
    layer.is_moe = layer.has_shared = true;
    layer.shared = values.mlp(d.hidden, 32);
    layer.router = values.matrix(d.num_experts, d.hidden);
    for (int e = 0; e < d.num_experts; ++e) layer.experts.push_back(values.mlp(d.hidden, 32));
  }
  return model;
}

void check_steps(bool latent, size_t num_nodes) {
  Values values;
  Model model = make_model(values, latent);
  const ModelDims& d = model.dims;
  ThreadPool pool(2, {std::vector<Node>(num_nodes)});
  ResidentWeights resident(model, pool);
  if (num_nodes > 1) {
    while (resident.fill(10000) > 0) {
    }
    resident.install();
  }
  DecodeStep step(model, pool);
  KVCache cache(model.windows(), d.kv_segments(), d.kv_width() / d.kv_segments(), model.compute);
  std::vector<float> logits(static_cast<size_t>(d.vocab));
  int32_t token = 1;
  std::vector<StepRow> rows = {{&cache, &token, 1, 0, logits.data()}};
  int64_t counted = 0;
  for (int32_t position = 0; position < 40; ++position) {  // within one page
    rows[0].position = position;
    token = position % 100;
    const int64_t before = allocations;
    CHECK(step.run(rows, nullptr));
    if (position >= 20) counted += allocations - before;
  }
  CHECK(counted == 0);
  if (counted != 0) std::fprintf(stderr, "%lld allocations in 20 steps\n", (long long)counted);
}

}  // namespace

void test_hot_path() {
  __sanitizer_install_malloc_and_free_hooks(count_allocation, ignore_free);
  const int64_t before = allocations;
  std::vector<int>* probe = new std::vector<int>(10);
  CHECK(allocations > before);  // the hook works
  delete probe;
  for (const size_t num_nodes : {1, 2}) {
    check_steps(true, num_nodes);
    check_steps(false, num_nodes);
  }
}
