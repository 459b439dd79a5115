// Binding of MatrixView and of the dispatch table: every shape, dtype and bound is checked here.
#include <string>

#include "bindings.h"
#include "common/status.h"
#include "cpu/dispatch.h"

namespace py = pybind11;

namespace moechat {
namespace {

void check(bool condition, const std::string& message) {
  if (!condition) throw Status("bad-argument", message);
}

Format parse_format(const std::string& name) {
  if (name == "f32") return Format::kF32;
  if (name == "bf16") return Format::kBF16;
  if (name == "fp8_block") return Format::kFP8Block;
  throw Status("bad-argument", "format is 'f32', 'bf16' or 'fp8_block', not '" + name + "'");
}

const char* format_name(Format format) {
  return format == Format::kF32 ? "f32" : format == Format::kBF16 ? "bf16" : "fp8_block";
}

bool is_type(const py::array& array, char kind, int64_t bytes) {
  return array.dtype().kind() == kind && array.itemsize() == bytes;
}

void set_scale(MatrixView& view, const py::object& scale, const std::pair<int32_t, int32_t>& block) {
  check(!scale.is_none(), "fp8_block needs a scale array");
  const auto grid = scale.cast<py::array>();
  check(is_type(grid, 'f', 4) && grid.ndim() == 2, "scale must be a 2-D float32 array");
  check(block.first > 0 && block.second > 0, "a block needs at least one row and one column");
  const int64_t grid_rows = (view.row_origin + view.rows + block.first - 1) / block.first;
  const int64_t grid_cols = (view.col_origin + view.cols + block.second - 1) / block.second;
  check(grid.shape(0) >= grid_rows && grid.shape(1) >= grid_cols,
        "the scale grid is smaller than the matrix needs");
  check((grid.shape(1) == 1 || grid.strides(1) == 4) && grid.strides(0) % 4 == 0 &&
            grid.strides(0) >= 4 * grid.shape(1),
        "scale rows must be contiguous");
  view.scale = static_cast<const uint8_t*>(grid.data());
  view.scale_row_stride = grid.strides(0) / 4;
  view.block_rows = block.first;
  view.block_cols = block.second;
}

PyMatrixView make_view(const std::string& format, const py::array& data, const py::object& scale,
                       const std::pair<int32_t, int32_t>& block, int64_t row_origin,
                       int64_t col_origin) {
  MatrixView view;
  view.format = parse_format(format);
  check(data.ndim() == 2, "data must have two dimensions");
  const char kind = view.format == Format::kF32 ? 'f' : 'u';
  check(is_type(data, kind, element_bytes(view.format)),
        "data has the wrong element type for format '" + format + "'");
  view.rows = data.shape(0);
  view.cols = data.shape(1);
  check(view.rows >= 1 && view.cols >= 1 && view.cols <= kMaxColumns,
        "a matrix needs 1 row and 1.." + std::to_string(kMaxColumns) + " columns at least");
  check(view.cols == 1 || data.strides(1) == data.itemsize(), "rows must be contiguous");
  check(data.strides(0) >= view.cols * data.itemsize() || view.rows == 1, "rows overlap");
  check(row_origin >= 0 && col_origin >= 0, "an origin cannot be negative");
  view.data = static_cast<const uint8_t*>(data.data());
  view.row_stride_bytes = data.strides(0);
  view.row_origin = row_origin;
  view.col_origin = col_origin;
  if (view.format == Format::kFP8Block)
    set_scale(view, scale, block);
  else
    check(scale.is_none(), "only fp8_block has scales");
  return {view, py::make_tuple(data, scale)};
}

PyMatrixView row_slice(const PyMatrixView& self, int64_t begin, int64_t count) {
  check(begin >= 0 && count >= 1 && begin <= self.view.rows - count, "rows out of range");
  return {self.view.row_slice(begin, count), self.owners};
}

PyMatrixView col_slice(const PyMatrixView& self, int64_t begin, int64_t count) {
  check(begin >= 0 && count >= 1 && begin <= self.view.cols - count, "columns out of range");
  return {self.view.col_slice(begin, count), self.owners};
}

}  // namespace

void register_kernels(py::module_& m) {
  m.def("supported_instruction_sets", &supported_instruction_sets, "Those that run here, best first.");
  m.def("active_instruction_set", [] { return std::string(active_instruction_set().name); });
  m.def("force_instruction_set", &force_instruction_set, py::arg("name"));

  py::class_<PyMatrixView>(m, "MatrixView", "A weight matrix in place; see cpp/common/matrix_view.h.")
      .def(py::init(&make_view), py::arg("format"), py::arg("data"), py::arg("scale") = py::none(),
           py::arg("block") = std::pair<int32_t, int32_t>(128, 128), py::arg("row_origin") = 0,
           py::arg("col_origin") = 0)
      .def("row_slice", &row_slice, py::arg("begin"), py::arg("count"))
      .def("col_slice", &col_slice, py::arg("begin"), py::arg("count"))
      .def_property_readonly("rows", [](const PyMatrixView& self) { return self.view.rows; })
      .def_property_readonly("cols", [](const PyMatrixView& self) { return self.view.cols; })
      .def_property_readonly(
          "format", [](const PyMatrixView& self) { return format_name(self.view.format); });
}

}  // namespace moechat
