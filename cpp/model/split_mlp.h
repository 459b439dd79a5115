// Where an MLP's inner elements can be cut into shares.
#pragma once
#include <vector>

#include "model/model.h"

namespace moechat {

// Edges of `num_parts` shares of about equal size: [0, ..., inner], num_parts + 1 of them, the
// first share never empty. They lie at multiples of the formats' units and, where there are enough of
// them, of the scale grids' blocks and of a task's outputs. Empty when there is no place to cut.
std::vector<int64_t> mlp_edges(const MlpWeights& mlp, int num_parts);

// Inner elements [begin, end) of an MLP, as views of its matrices.
MlpPart mlp_part(const MlpWeights& mlp, int64_t begin, int64_t end);

}  // namespace moechat
