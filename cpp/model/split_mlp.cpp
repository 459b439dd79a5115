#include "model/split_mlp.h"

#include <numeric>

#include "kernels/matmul/blocks.h"

namespace moechat {
namespace {

// Stored rows or columns of a view.
enum class Axis { kRows, kCols };

Axis inner_axis_of_gate(const MatrixView& w) { return w.transposed ? Axis::kCols : Axis::kRows; }
Axis inner_axis_of_down(const MatrixView& w) { return w.transposed ? Axis::kRows : Axis::kCols; }

// Elements at whose multiples the view can be cut at all.
int64_t unit_along(const MatrixView& w, Axis axis) {
  if (axis == Axis::kCols) return cut_of(w.format);
  return w.format == Format::kGPTQ ? 8 : 1;
}

// Elements that share scales.
int64_t block_along(const MatrixView& w, Axis axis) {
  if (w.scale == nullptr || w.group_index != nullptr) return 1;
  return axis == Axis::kCols ? w.block_cols : w.block_rows;
}

// The least common multiple, or `limit` if that is less.
int64_t common(int64_t a, int64_t b, int64_t limit) {
  if (a >= limit || b >= limit) return limit;
  return std::min(limit, std::lcm(a, b));  // both below 2^24
}

MatrixView slice(const MatrixView& w, Axis axis, int64_t begin, int64_t count) {
  return axis == Axis::kCols ? w.col_slice(begin, count) : w.row_slice(begin, count);
}

}  // namespace

std::vector<int64_t> mlp_edges(const MlpWeights& mlp, int num_parts) {
  const int64_t inner = mlp.gate.outputs();
  if (num_parts == 1) return {0, inner};
  int64_t unit = 1, block = kRowBlock;
  const auto join = [&](const MatrixView& w, Axis axis) {
    unit = common(unit, unit_along(w, axis), inner);
    block = common(block, block_along(w, axis), inner);
  };
  join(mlp.gate, inner_axis_of_gate(mlp.gate));
  join(mlp.up, inner_axis_of_gate(mlp.up));
  join(mlp.down, inner_axis_of_down(mlp.down));
  const auto pieces_of = [&](int64_t piece) { return (inner + piece - 1) / piece; };
  int64_t piece = common(unit, block, inner);
  if (pieces_of(piece) < num_parts) piece = common(unit, 8, inner);
  if (pieces_of(piece) < num_parts) piece = unit;
  const int64_t pieces = pieces_of(piece);
  if (pieces < 2) return {};
  std::vector<int64_t> edges;
  for (int64_t part = 0; part <= num_parts; ++part)
    edges.push_back(std::min(inner, (part * pieces + num_parts - 1) / num_parts * piece));
  return edges;
}

MlpPart mlp_part(const MlpWeights& mlp, int64_t begin, int64_t end) {
  MlpPart part;
  if (begin == end) return part;
  const int64_t count = end - begin;
  part.gate = slice(mlp.gate, inner_axis_of_gate(mlp.gate), begin, count);
  part.up = slice(mlp.up, inner_axis_of_gate(mlp.up), begin, count);
  part.down = slice(mlp.down, inner_axis_of_down(mlp.down), begin, count);
  part.begin = begin;
  return part;
}

}  // namespace moechat
