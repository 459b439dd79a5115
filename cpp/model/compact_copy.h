// Copies of views in memory of their own: rows next to each other, and no more scales and zero
// points than the view uses.
#pragma once
#include <cstddef>

#include "common/matrix_view.h"

namespace moechat {

// Bytes that compact_copy writes.
size_t compact_bytes(const MatrixView& view);

// The same matrix, stored at `to`, which is aligned to 64 and has compact_bytes. A kernel computes
// the same bits with it, whatever the view's origins were.
MatrixView compact_copy(const MatrixView& view, uint8_t* to);

}  // namespace moechat
