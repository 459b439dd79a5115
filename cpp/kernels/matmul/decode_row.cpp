#include "kernels/matmul/decode_row.h"

#include "kernels/matmul/formats.h"
#include "kernels/matmul/weight_at.h"

namespace moechat {

void decode_columns(const MatrixView& w, int64_t row, int64_t begin, int64_t end, float* dst) {
  for_format(w.format, [&](auto format) {
    for (int64_t c = begin; c < end; ++c) dst[c - begin] = weight_at<format.value>(w, row, c);
  });
}

}  // namespace moechat
