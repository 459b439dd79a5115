// Binding of MatrixView, the dispatch table and the matrix products: every shape, dtype and bound
// is checked here, so that no kernel has to.
#include "bindings_kernels.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/dispatch.h"

namespace py = pybind11;

namespace moechat {
namespace {

using Inputs = const float* const*;
using Outputs = float* const*;

constexpr int64_t kMaxOrigin = int64_t{1} << 40;  // sums of an origin and a shape cannot overflow

Format parse_format(const std::string& name) {
  if (name == "f32") return Format::kF32;
  if (name == "bf16") return Format::kBF16;
  if (name == "fp8_block") return Format::kFP8Block;
  throw Status("bad-argument", "format is 'f32', 'bf16' or 'fp8_block', not '" + name + "'");
}

const char* format_name(Format format) {
  return format == Format::kF32 ? "f32" : format == Format::kBF16 ? "bf16" : "fp8_block";
}

void set_scale(MatrixView& view, const py::object& scale, const py::tuple& block) {
  check(py::isinstance<py::array>(scale), "fp8_block needs a scale array");
  const auto grid = py::reinterpret_borrow<py::array>(scale);
  check(is_type(grid, 'f', 4) && grid.ndim() == 2, "scale must be a 2-D float32 array");
  check(block.size() == 2, "block is (rows, columns)");
  const auto block_rows = block[0].cast<int64_t>(), block_cols = block[1].cast<int64_t>();
  constexpr int64_t kMaxBlock = std::numeric_limits<int32_t>::max();
  check(block_rows >= 1 && block_cols >= 1 && block_rows <= kMaxBlock && block_cols <= kMaxBlock,
        "a block needs at least one row and one column, at most 2^31 - 1");
  const int64_t grid_rows = (view.row_origin + view.rows + block_rows - 1) / block_rows;
  const int64_t grid_cols = (view.col_origin + view.cols + block_cols - 1) / block_cols;
  if (grid.shape(0) < grid_rows || grid.shape(1) < grid_cols)
    throw Status("bad-argument", "the scale grid needs " + std::to_string(grid_rows) + " x " +
                                     std::to_string(grid_cols) +
                                     " entries for this matrix, it has " +
                                     std::to_string(grid.shape(0)) + " x " +
                                     std::to_string(grid.shape(1)));
  check((grid.shape(1) == 1 || grid.strides(1) == 4) &&
            (grid.shape(0) == 1 || grid.strides(0) == 4 * grid.shape(1)),
        "scale must be C-contiguous");
  view.scale = static_cast<const uint8_t*>(grid.data());
  view.scale_row_stride = grid.shape(1);
  view.block_rows = static_cast<int32_t>(block_rows);
  view.block_cols = static_cast<int32_t>(block_cols);
}

PyMatrixView make_view(const std::string& format, const py::array& data, const py::object& scale,
                       const py::tuple& block, int64_t row_origin, int64_t col_origin) {
  MatrixView view;
  view.format = parse_format(format);
  check(data.ndim() == 2, "data must have two dimensions");
  if (!is_type(data, view.format == Format::kF32 ? 'f' : 'u', element_bytes(view.format)))
    throw Status("bad-argument", "data has the wrong element type for format '" + format + "'");
  view.rows = data.shape(0);
  view.cols = data.shape(1);
  check(view.rows >= 1, "a matrix needs at least one row");
  if (view.cols < 1 || view.cols > kMaxColumns)
    throw Status("bad-argument", "a matrix needs 1.." + std::to_string(kMaxColumns) +
                                     " columns, not " + std::to_string(view.cols));
  const int64_t bytes = element_bytes(view.format);
  check(view.cols == 1 || data.strides(1) == bytes, "the rows of data must be contiguous");
  check(view.rows == 1 || data.strides(0) >= view.cols * bytes, "the rows of data overlap");
  check(row_origin >= 0 && col_origin >= 0 && row_origin <= kMaxOrigin && col_origin <= kMaxOrigin,
        "an origin must lie in 0..2^40");
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

// Row addresses of a 2-D float32 array whose rows are contiguous.
template <typename Pointer>
std::vector<Pointer> row_pointers(const py::array& array, void* data) {
  std::vector<Pointer> rows;
  for (int64_t r = 0; r < array.shape(0); ++r)
    rows.push_back(reinterpret_cast<Pointer>(static_cast<char*>(data) + r * array.strides(0)));
  return rows;
}

void check_activations(const py::array& array, int64_t width, const char* message) {
  check(is_type(array, 'f', 4) && array.ndim() == 2 && array.shape(0) >= 1 &&
            array.shape(1) == width && (width == 1 || array.strides(1) == 4) &&
            array.strides(0) % 4 == 0 && reinterpret_cast<uintptr_t>(array.data()) % 4 == 0,
        message);
}

struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};

// One product on the calling thread: x [R, inputs] -> y [R, outputs], columns [begin, end) written.
template <typename Kernel>
py::array product(int64_t inputs, int64_t outputs, const py::array& x, int64_t begin, int64_t end,
                  const py::object& out, const Kernel& kernel) {
  check_activations(x, inputs, "x must be float32 [rows, inputs of the matrix], rows contiguous");
  if (end == -1) end = outputs;
  check(begin >= 0 && begin <= end && end <= outputs, "begin and end lie outside the outputs");
  py::array y;
  if (out.is_none()) {
    py::array_t<float> fresh({x.shape(0), outputs});
    std::fill_n(fresh.mutable_data(), fresh.size(), std::numeric_limits<float>::quiet_NaN());
    y = fresh;
  } else {
    check(py::isinstance<py::array>(out), "out must be an array");
    y = py::reinterpret_borrow<py::array>(out);
    check_activations(y, outputs, "out must be float32 [rows, outputs of the matrix]");
    check(y.shape(0) == x.shape(0), "out needs as many rows as x");
    check(y.writeable(), "out is read-only");
  }
  const auto x_rows = row_pointers<const float*>(x, const_cast<void*>(x.data()));
  const auto y_rows = row_pointers<float*>(y, y.mutable_data());
  const std::unique_ptr<void, FreeAligned> scratch(
      ::operator new(kMatmulScratchBytes, std::align_val_t{64}));
  const MatmulKernels& kernels = *active_instruction_set().matmul;
  const py::gil_scoped_release released;
  kernel(kernels, begin, end, x_rows.data(), x.shape(0), y_rows.data(), scratch.get());
  return y;
}

py::array gemv(const PyMatrixView& w, const py::array& x, const std::string& compute, int64_t begin,
               int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  check(x.ndim() != 2 || x.shape(0) <= kMaxGemvRows, "gemv takes 16 rows at most");
  return product(w.view.cols, w.view.rows, x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   kernels.gemv(w.view, first, last, mode, inputs, static_cast<int>(rows), outputs,
                                scratch);
                 });
}

py::array gemm(const PyMatrixView& w, const py::array& x, const std::string& compute, int64_t begin,
               int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  return product(w.view.cols, w.view.rows, x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   kernels.gemm(w.view, first, last, mode, inputs, rows, outputs, scratch);
                 });
}

py::array gemv_transposed(const PyMatrixView& w, const py::array& x, const std::string& compute,
                          int64_t begin, int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  return product(w.view.rows, w.view.cols, x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   kernels.gemv_transposed(w.view, first, last, mode, inputs, rows, outputs,
                                           scratch);
                 });
}

template <typename Function>
void define_product(py::module_& m, const char* name, Function function, const char* doc) {
  m.def(name, function, doc, py::arg("view"), py::arg("x"), py::arg("compute"),
        py::arg("begin") = 0, py::arg("end") = -1, py::arg("out") = py::none());
}

}  // namespace

void register_kernels(py::module_& m) {
  m.def("supported_instruction_sets", &supported_instruction_sets,
        "Those that run here, best first.");
  m.def("active_instruction_set", [] { return std::string(active_instruction_set().name); });
  m.def("force_instruction_set", &force_instruction_set, py::arg("name"));

  py::class_<PyMatrixView>(m, "MatrixView",
                           "A weight matrix in place; see cpp/common/matrix_view.h.")
      .def(py::init(&make_view), py::arg("format"), py::arg("data"), py::arg("scale") = py::none(),
           py::arg("block") = py::make_tuple(128, 128), py::arg("row_origin") = 0,
           py::arg("col_origin") = 0)
      .def("row_slice", &row_slice, py::arg("begin"), py::arg("count"))
      .def("col_slice", &col_slice, py::arg("begin"), py::arg("count"))
      .def_property_readonly("rows", [](const PyMatrixView& self) { return self.view.rows; })
      .def_property_readonly("cols", [](const PyMatrixView& self) { return self.view.cols; })
      .def_property_readonly(
          "format", [](const PyMatrixView& self) { return format_name(self.view.format); });

  define_product(m, "gemv", &gemv, "y[r, n] = sum_k x[r, k] W[n, k], 1..16 rows.");
  define_product(m, "gemm", &gemm, "The same for any number of rows.");
  define_product(m, "gemv_transposed", &gemv_transposed, "y[r, k] = sum_n x[r, n] W[n, k].");
  register_vector_kernels(m);
}

}  // namespace moechat
