// Stored rows as float32, exactly: the embedding, and the reference products.
#pragma once
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {

// dst[c - begin] = stored element (row, c) for c in [begin, end), any format.
void decode_columns(const MatrixView& w, int64_t row, int64_t begin, int64_t end, float* dst);

// dst[0, cols) = stored row `row`.
inline void decode_row(const MatrixView& w, int64_t row, float* dst) {
  decode_columns(w, row, 0, w.cols, dst);
}

}  // namespace moechat
