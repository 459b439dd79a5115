#include "model/model.h"

#include "common/number_formats.h"
#include "common/status.h"

namespace moechat {

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

void decode_row(const MatrixView& view, int64_t row, float* dst) {
  const uint8_t* p = view.data + row * view.row_stride_bytes;
  for (int64_t k = 0; k < view.cols; ++k) {
    switch (view.format) {
      case Format::kF32: dst[k] = load_f32(p + 4 * k); break;
      case Format::kBF16: dst[k] = bf16_to_f32(load_u16(p + 2 * k)); break;
      case Format::kFP8Block:
        dst[k] = fp8_e4m3_to_f32(p[k]) * load_f32(view.scale_at(row, k));
        break;
    }
  }
}

}  // namespace moechat
