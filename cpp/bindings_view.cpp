// Binding of MatrixView: every shape, dtype and bound is checked here, so that no kernel has to.
#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "bindings_kernels.h"
#include "kernels/matmul/matmul.h"

namespace py = pybind11;

namespace moechat {
namespace {

constexpr int64_t kMaxOrigin = int64_t{1} << 40;  // sums of an origin and a shape cannot overflow

enum class Scales { kNone, kGrid, kGridAndZeros };

struct FormatRow {
  const char* name;
  Format format;
  char kind;  // of the array's elements, as in numpy
  int64_t item_bytes;
  Scales scales;
};

// By Format's value.
constexpr FormatRow kFormats[] = {
    {"f32", Format::kF32, 'f', 4, Scales::kNone},
    {"f16", Format::kF16, 'u', 2, Scales::kNone},
    {"bf16", Format::kBF16, 'u', 2, Scales::kNone},
    {"fp8", Format::kFP8, 'u', 1, Scales::kGrid},
    {"mxfp4", Format::kMXFP4, 'u', 1, Scales::kGrid},
    {"int4", Format::kInt4, 'i', 4, Scales::kGrid},
    {"awq", Format::kAWQ, 'i', 4, Scales::kGridAndZeros},
    {"gptq", Format::kGPTQ, 'i', 4, Scales::kGridAndZeros},
    {"q8_0", Format::kQ8_0, 'u', 1, Scales::kNone},
    {"q4_0", Format::kQ4_0, 'u', 1, Scales::kNone},
    {"q5_0", Format::kQ5_0, 'u', 1, Scales::kNone},
    {"q4_k", Format::kQ4_K, 'u', 1, Scales::kNone},
    {"q5_k", Format::kQ5_K, 'u', 1, Scales::kNone},
    {"q6_k", Format::kQ6_K, 'u', 1, Scales::kNone},
    {"mxfp4_block", Format::kMXFP4Block, 'u', 1, Scales::kNone},
};

const FormatRow& row_of(Format format) { return kFormats[static_cast<int>(format)]; }

const FormatRow& find_format(std::string_view name) {
  std::string known;
  for (const FormatRow& row : kFormats) {
    if (name == row.name) return row;
    known += std::string(known.empty() ? "" : ", ") + row.name;
  }
  throw Status("bad-argument",
               "format is one of " + known + ", not '" + std::string(name) + "'");
}

[[noreturn]] void refuse(const FormatRow& row, const std::string& what) {
  throw Status("bad-argument", std::string(row.name) + ": " + what);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns that a stored row's `units` times the format's unit hold.
int64_t columns(const FormatRow& row, const py::array& data, const py::object& cols) {
  const Unit unit = unit_of(row.format);
  const int64_t items = data.shape(1);
  const int64_t items_of_unit = unit.bytes / row.item_bytes;
  if (items % items_of_unit != 0)
    refuse(row, "a row has " + std::to_string(items) + " bytes, not a multiple of " +
                    std::to_string(items_of_unit));
  // A product that the bound on columns refuses must not overflow first.
  const int64_t units = std::min(items / items_of_unit, kMaxColumns + 1);
  const int64_t held = units * unit.cols;
  if (cols.is_none()) return held;
  const auto wanted = cols.cast<int64_t>();
  const int64_t least = row.format == Format::kInt4 ? held - unit.cols + 1 : held;
  if (wanted < least || wanted > held)
    refuse(row, "data holds " + std::to_string(held) + " columns, not " + std::to_string(wanted));
  return wanted;
}

void set_data(MatrixView& view, const FormatRow& row, const py::array& data,
              const py::object& cols) {
  check(data.ndim() == 2, "data must have two dimensions");
  if (!is_type(data, row.kind, row.item_bytes)) refuse(row, "data has the wrong element type");
  view.cols = columns(row, data, cols);
  view.rows = row.format == Format::kGPTQ ? 8 * data.shape(0) : data.shape(0);
  check(view.rows >= 1, "a matrix needs at least one row");
  if (view.cols < 1 || view.cols > kMaxColumns)
    throw Status("bad-argument", "a stored matrix needs 1.." + std::to_string(kMaxColumns) +
                                     " columns");
  const int64_t item_stride = row.item_bytes * view.col_step;
  const int64_t row_bytes = (data.shape(1) - 1) * item_stride + row.item_bytes;
  check(data.shape(1) == 1 || data.strides(1) == item_stride,
        "the rows of data must be contiguous, or every second column with col_step 2");
  check(data.shape(0) == 1 || data.strides(0) >= row_bytes, "the rows of data overlap");
  if (view.col_origin % cut_of(row.format) != 0)
    refuse(row, "col_origin must be a multiple of " + std::to_string(cut_of(row.format)));
  view.data = static_cast<const uint8_t*>(data.data());
  view.row_stride_bytes = data.strides(0);
}

ScaleType scale_type_of(const FormatRow& row, const py::array& grid, const py::object& name) {
  struct TypeRow {
    const char* name;
    ScaleType type;
    char kind;
  };
  constexpr TypeRow kTypes[] = {{"f32", ScaleType::kF32, 'f'},
                                {"e8m0", ScaleType::kE8M0, 'u'},
                                {"bf16", ScaleType::kBF16, 'u'},
                                {"f16", ScaleType::kF16, 'u'}};
  if (name.is_none()) {
    for (const TypeRow& type : {kTypes[0], kTypes[1]})
      if (is_type(grid, type.kind, scale_bytes(type.type))) return type.type;
    refuse(row, "scale must be float32 or uint8, or scale_type say what it is");
  }
  const auto wanted = name.cast<std::string>();
  for (const TypeRow& type : kTypes)
    if (wanted == type.name) {
      if (!is_type(grid, type.kind, scale_bytes(type.type)))
        refuse(row, "scale has the wrong element type for scale_type '" + wanted + "'");
      return type.type;
    }
  refuse(row, "scale_type is 'f32', 'bf16', 'f16' or 'e8m0', not '" + wanted + "'");
}

// Base and row stride of a 2-D array of at least `rows` x `items`, rows contiguous and apart.
const uint8_t* grid_base(const FormatRow& row, const py::array& grid, const char* name,
                         int64_t rows, int64_t items, int64_t* row_stride_bytes) {
  const int64_t item_bytes = grid.itemsize();
  if (grid.shape(0) < rows || grid.shape(1) < items)
    refuse(row, std::string(name) + " needs " + std::to_string(rows) + " x " +
                    std::to_string(items) + " entries for this matrix, it has " +
                    std::to_string(grid.shape(0)) + " x " + std::to_string(grid.shape(1)));
  if ((grid.shape(1) > 1 && grid.strides(1) != item_bytes) ||
      (grid.shape(0) > 1 && grid.strides(0) < grid.shape(1) * item_bytes))
    refuse(row, std::string("the rows of ") + name + " must be contiguous and apart");
  *row_stride_bytes = grid.strides(0);
  return static_cast<const uint8_t*>(grid.data());
}

void set_block(MatrixView& view, const FormatRow& row, const py::tuple& block) {
  check(block.size() == 2, "block is (rows, columns)");
  const auto block_rows = block[0].cast<int64_t>(), block_cols = block[1].cast<int64_t>();
  constexpr int64_t kMaxBlock = std::numeric_limits<int32_t>::max();
  check(block_rows >= 1 && block_cols >= 1 && block_rows <= kMaxBlock && block_cols <= kMaxBlock,
        "a block needs at least one row and one column, at most 2^31 - 1");
  view.block_rows = static_cast<int32_t>(block_rows);
  view.block_cols = static_cast<int32_t>(block_cols);
  if (row.scales == Scales::kGridAndZeros) {
    if (block_cols != 1) refuse(row, "every column has scales of its own: block is (rows, 1)");
    return;
  }
  const int64_t unit = unit_of(row.format).cols;
  if (block_cols % unit != 0 && view.col_origin + view.cols > block_cols)
    refuse(row, "the columns of a block must be a multiple of " + std::to_string(unit));
}

void set_group_index(MatrixView& view, const FormatRow& row, const py::object& group_index,
                     int64_t grid_rows) {
  check(row.format == Format::kGPTQ, "only gptq has a group_index");
  check(py::isinstance<py::array>(group_index), "group_index must be an array");
  const auto index = py::reinterpret_borrow<py::array>(group_index);
  if (!is_type(index, 'i', 4) || index.ndim() != 1 || index.shape(0) != view.rows ||
      (view.rows > 1 && index.strides(0) != 4))
    refuse(row, "group_index must be int32, one entry a stored row, contiguous");
  view.group_index = static_cast<const uint8_t*>(index.data());
  for (int64_t r = 0; r < view.rows; ++r)
    if (const int64_t group = view.grid_row(r); group < 0 || group >= grid_rows)
      refuse(row, "group_index of row " + std::to_string(r) + " is " + std::to_string(group) +
                      ", the scale has " + std::to_string(grid_rows) + " rows");
}

void set_scales(MatrixView& view, const FormatRow& row, const py::object& scale,
                const py::tuple& block, const py::object& scale_type, const py::object& zeros,
                const py::object& group_index) {
  if (!py::isinstance<py::array>(scale)) refuse(row, "needs a scale array");
  const auto grid = py::reinterpret_borrow<py::array>(scale);
  if (grid.ndim() != 2) refuse(row, "scale must be a 2-D array");
  view.scale_type = scale_type_of(row, grid, scale_type);
  set_block(view, row, block);
  int64_t grid_rows = ceil_div(view.row_origin + view.rows, view.block_rows);
  const int64_t grid_cols = ceil_div(view.col_origin + view.cols, view.block_cols);
  if (!group_index.is_none()) {
    grid_rows = grid.shape(0);
    set_group_index(view, row, group_index, grid_rows);
  }
  view.scale = grid_base(row, grid, "scale", grid_rows, grid_cols, &view.scale_row_stride_bytes);
  if (row.scales != Scales::kGridAndZeros) {
    if (!zeros.is_none()) refuse(row, "has no zeros");
    return;
  }
  if (!py::isinstance<py::array>(zeros)) refuse(row, "needs a zeros array");
  const auto packed = py::reinterpret_borrow<py::array>(zeros);
  if (packed.ndim() != 2 || !is_type(packed, 'i', 4)) refuse(row, "zeros must be 2-D int32");
  view.zeros = grid_base(row, packed, "zeros", grid_rows, ceil_div(grid_cols, 8),
                         &view.zeros_row_stride_bytes);
}

PyMatrixView make_view(std::string_view format, const py::array& data, const py::object& scale,
                       const py::tuple& block, int64_t row_origin, int64_t col_origin,
                       const py::object& cols, const py::object& scale_type,
                       const py::object& zeros, const py::object& group_index, bool transposed,
                       int64_t col_step) {
  const FormatRow& row = find_format(format);
  MatrixView view;
  view.format = row.format;
  view.transposed = transposed;
  if (row.scales == Scales::kGridAndZeros && !transposed)
    refuse(row, "is stored [inputs, outputs]: transposed must be true");
  const bool plain = row.format == Format::kF32 || row.format == Format::kF16 ||
                     row.format == Format::kBF16;
  if (col_step != 1 && !(col_step == 2 && plain && transposed))
    refuse(row, "col_step is 1, or 2 for f32, f16 and bf16 that are transposed");
  view.col_step = static_cast<int32_t>(col_step);
  check(row_origin >= 0 && col_origin >= 0 && row_origin <= kMaxOrigin && col_origin <= kMaxOrigin,
        "an origin must lie in 0..2^40");
  view.row_origin = row_origin;
  view.col_origin = col_origin;
  set_data(view, row, data, cols);
  if (row.scales != Scales::kNone)
    set_scales(view, row, scale, block, scale_type, zeros, group_index);
  else if (!scale.is_none() || !scale_type.is_none() || !zeros.is_none() || !group_index.is_none())
    refuse(row, "has no scale, zeros or group_index of its own");
  return {view, py::make_tuple(data, scale, zeros, group_index)};
}

PyMatrixView row_slice(const PyMatrixView& self, int64_t begin, int64_t count) {
  const MatrixView& view = self.view;
  check(begin >= 0 && count >= 1 && begin <= view.rows - count, "rows out of range");
  if (view.format == Format::kGPTQ && (begin % 8 != 0 || count % 8 != 0))
    refuse(row_of(view.format), "rows can be cut at multiples of 8");
  return {view.row_slice(begin, count), self.owners};
}

PyMatrixView col_slice(const PyMatrixView& self, int64_t begin, int64_t count) {
  const MatrixView& view = self.view;
  check(begin >= 0 && count >= 1 && begin <= view.cols - count, "columns out of range");
  const int64_t unit = cut_of(view.format);
  if (begin % unit != 0 || (count % unit != 0 && begin + count != view.cols))
    refuse(row_of(view.format), "columns can be cut at multiples of " + std::to_string(unit));
  return {view.col_slice(begin, count), self.owners};
}

}  // namespace

void register_view(py::module_& m) {
  const auto none = py::none();
  py::class_<PyMatrixView>(m, "MatrixView",
                           "A weight matrix in place; see cpp/common/matrix_view.h.")
      .def(py::init(&make_view), py::arg("format"), py::arg("data"), py::arg("scale") = none,
           py::arg("block") = py::make_tuple(128, 128), py::arg("row_origin") = 0,
           py::arg("col_origin") = 0, py::kw_only(), py::arg("cols") = none,
           py::arg("scale_type") = none, py::arg("zeros") = none, py::arg("group_index") = none,
           py::arg("transposed") = false, py::arg("col_step") = 1)
      .def("row_slice", &row_slice, py::arg("begin"), py::arg("count"))
      .def("col_slice", &col_slice, py::arg("begin"), py::arg("count"))
      .def_property_readonly("rows", [](const PyMatrixView& self) { return self.view.rows; })
      .def_property_readonly("cols", [](const PyMatrixView& self) { return self.view.cols; })
      .def_property_readonly("outputs",
                             [](const PyMatrixView& self) { return self.view.outputs(); })
      .def_property_readonly("inputs", [](const PyMatrixView& self) { return self.view.inputs(); })
      .def_property_readonly("transposed",
                             [](const PyMatrixView& self) { return self.view.transposed; })
      .def_property_readonly(
          "format", [](const PyMatrixView& self) { return row_of(self.view.format).name; });
}

}  // namespace moechat
