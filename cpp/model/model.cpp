#include "model/model.h"

#include "common/status.h"
#include "kernels/matmul/decode_row.h"
#include "kernels/rope/rope.h"

namespace moechat {

std::vector<int64_t> Model::windows() const {
  std::vector<int64_t> windows;
  for (const LayerWeights& layer : layers) windows.push_back(layer.window);
  return windows;
}

void throw_non_finite(int64_t first_bad_layer) {
  const std::string where = first_bad_layer < 0
                                ? "the output head"
                                : "model.layers." + std::to_string(first_bad_layer);
  throw Status("non-finite-logits",
               "the logits hold NaN or infinity; the first bad values leave " + where);
}

bool all_finite(const float* x, int64_t n) {
  constexpr int kLanes = 16;
  float probe[kLanes] = {};  // x * 0 is NaN for NaN and infinity
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) probe[l] += x[i + l] * 0.0f;
  for (; i < n; ++i) probe[0] += x[i] * 0.0f;
  for (int l = 1; l < kLanes; ++l) probe[0] += probe[l];
  return probe[0] == 0.0f;
}

void embed(const Model& model, int32_t token, float* x) {
  decode_row(model.embedding, token, x);
  if (model.dims.embedding_scale == 1.0f) return;
  for (int64_t i = 0; i < model.dims.hidden; ++i) x[i] *= model.dims.embedding_scale;
}

void model_angles(const Model& model, int64_t position, float* cos_sin) {
  for (const Rope& rope : model.ropes) {
    rope_angles(position, rope.inverse_frequencies.data(), rope.pairs(), rope.amplitude, cos_sin);
    cos_sin += 2 * rope.pairs();
  }
}

}  // namespace moechat
