// Binding of plain reading, for measurements.
#include "bindings_kernels.h"
#include "cpu/threads.h"
#include "kernels/read/read.h"

namespace py = pybind11;

namespace moechat {
namespace {

const uint8_t* range_of(const py::array& array, int64_t begin_byte, int64_t end_byte) {
  check((array.flags() & py::array::c_style) != 0, "the array must be C-contiguous");
  check(begin_byte >= 0 && begin_byte <= end_byte && end_byte <= array.nbytes(),
        "the bytes lie outside the array");
  return static_cast<const uint8_t*>(array.data()) + begin_byte;
}

uint64_t checksum(const py::array& array, int64_t begin_byte, int64_t end_byte) {
  const uint8_t* bytes = range_of(array, begin_byte, end_byte);
  const py::gil_scoped_release released;
  return read_checksum(bytes, end_byte - begin_byte, /*prefetch=*/false);
}

uint64_t bandwidth(ThreadPool& pool, const py::array& array, int64_t begin_byte, int64_t end_byte,
                   bool prefetch) {
  const uint8_t* bytes = range_of(array, begin_byte, end_byte);
  const py::gil_scoped_release released;
  return read_in_parallel(pool, bytes, end_byte - begin_byte, prefetch);
}

}  // namespace

void register_read(py::module_& m) {
  m.def("read_checksum", &checksum, "Sum of the 64-bit words, at memory speed.", py::arg("array"),
        py::arg("begin_byte"), py::arg("end_byte"));
  m.def("read_bandwidth", &bandwidth,
        "The same sum by all threads of a pool: time it to learn how fast memory can be read.",
        py::arg("pool"), py::arg("array"), py::arg("begin_byte"), py::arg("end_byte"),
        py::arg("prefetch") = false);
}

}  // namespace moechat
