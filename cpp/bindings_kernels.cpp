// Binding of the dispatch table and the matrix products: every shape, dtype and bound is checked
// here, so that no kernel has to.
#include "bindings_kernels.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/dispatch.h"
#include "kernels/matmul/decode_row.h"
#include "kernels/matmul/product.h"

namespace py = pybind11;

namespace moechat {
namespace {

using Inputs = const float* const*;
using Outputs = float* const*;

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
  // Kept, as a pool's worker keeps its own: fresh pages would cost more than a small product.
  thread_local const std::unique_ptr<void, FreeAligned> scratch(
      ::operator new(kMatmulScratchBytes, std::align_val_t{64}));
  const MatmulKernels& kernels = *active_instruction_set().matmul;
  const py::gil_scoped_release released;
  kernel(kernels, begin, end, x_rows.data(), x.shape(0), y_rows.data(), scratch.get());
  return y;
}

// The products of matmul.h, on the stored matrix.
py::array gemv(const PyMatrixView& w, const py::array& x, const std::string& compute, int64_t begin,
               int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  check(!w.view.transposed, "gemv takes a row-major view; multiply takes any");
  check(x.ndim() != 2 || x.shape(0) <= kMaxGemvRows, "gemv takes 16 rows at most");
  return product(w.view.cols, w.view.rows, x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   kernels.gemv(w.view, first, last, mode, inputs, static_cast<int>(rows), outputs,
                                scratch, nullptr);
                 });
}

py::array gemm(const PyMatrixView& w, const py::array& x, const std::string& compute, int64_t begin,
               int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  check(!w.view.transposed, "gemm takes a row-major view; multiply takes any");
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

// The products of product.h, on the weight.
py::array multiply_weight(const PyMatrixView& w, const py::array& x, const std::string& compute,
                          int64_t begin, int64_t end, const py::object& out) {
  const Compute mode = parse_compute(compute);
  return product(w.view.inputs(), w.view.outputs(), x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   multiply(kernels, w.view, first, last, mode, inputs, rows, outputs, scratch);
                 });
}

py::array multiply_weight_transposed(const PyMatrixView& w, const py::array& x,
                                     const std::string& compute, int64_t begin, int64_t end,
                                     const py::object& out) {
  const Compute mode = parse_compute(compute);
  return product(w.view.outputs(), w.view.inputs(), x, begin, end, out,
                 [&](const MatmulKernels& kernels, int64_t first, int64_t last, Inputs inputs,
                     int64_t rows, Outputs outputs, void* scratch) {
                   multiply_transposed(kernels, w.view, first, last, mode, inputs, rows, outputs,
                                       scratch);
                 });
}

py::array_t<float> decode_stored_row(const PyMatrixView& w, int64_t row) {
  check(row >= 0 && row < w.view.rows, "row lies outside the matrix");
  py::array_t<float> values(w.view.cols);
  decode_row(w.view, row, values.mutable_data());
  return values;
}

int64_t dot_peak(int64_t iterations) {
  check(iterations >= 0 && iterations <= int64_t{1} << 40, "iterations must be 0 to 2^40");
  const auto run = active_instruction_set().dot_peak;
  const py::gil_scoped_release released;
  return run(iterations);
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

  register_view(m);
  define_product(m, "gemv", &gemv, "y[r, n] = sum_k x[r, k] W[n, k], 1..16 rows.");
  define_product(m, "gemm", &gemm, "The same for any number of rows.");
  define_product(m, "gemv_transposed", &gemv_transposed, "y[r, k] = sum_n x[r, n] W[n, k].");
  define_product(m, "multiply", &multiply_weight,
                 "x [R, inputs] -> [R, outputs], whichever way round the weight is stored.");
  define_product(m, "multiply_transposed", &multiply_weight_transposed,
                 "x [R, outputs] -> [R, inputs].");
  m.def("decode_row", &decode_stored_row, "A stored row as float32 [cols].", py::arg("view"),
        py::arg("row"));
  m.def("dot_peak", &dot_peak,
        "Runs the active instruction set's fastest dot products; how many multiplications and "
        "additions they were.",
        py::arg("iterations"));
  register_vector_kernels(m);
  register_kv_codec(m);
  register_read(m);
}

}  // namespace moechat
