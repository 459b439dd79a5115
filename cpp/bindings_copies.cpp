// Many copies to a device in one call without the interpreter lock: other threads launch kernels.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace moechat {
namespace {

// cuMemcpyHtoDAsync of the CUDA driver API: target, source, bytes, stream; 0 is success.
using CopyFunction = int (*)(uint64_t, const void*, size_t, void*);

struct HostSpan {
  uint64_t target;
  const uint8_t* source;
  size_t num_bytes;
};

// Starts copies of `spans` (offset in the target, array) in pieces, in order.
void copy_pieces(uintptr_t function, uint64_t target, int64_t target_bytes,
                 const std::vector<std::pair<int64_t, py::array>>& spans, int64_t piece_bytes,
                 uintptr_t stream) {
  check(function != 0, "there is no function that copies");
  check(piece_bytes > 0, "piece_bytes must be positive");
  std::vector<HostSpan> checked;
  for (const auto& [begin, array] : spans) {
    check((array.flags() & py::array::c_style) != 0, "a source must be contiguous");
    const auto num_bytes = static_cast<int64_t>(array.nbytes());
    check(begin >= 0 && begin <= target_bytes && num_bytes <= target_bytes - begin,
          "a copy would leave its target");
    checked.push_back({target + static_cast<uint64_t>(begin),
                       static_cast<const uint8_t*>(array.data()), static_cast<size_t>(num_bytes)});
  }
  const auto copy = reinterpret_cast<CopyFunction>(function);
  const auto piece = static_cast<size_t>(piece_bytes);
  int error = 0;
  {
    const py::gil_scoped_release release;
    for (const HostSpan& span : checked)
      for (size_t done = 0; done < span.num_bytes && error == 0; done += piece)
        error = copy(span.target + done, span.source + done,
                     std::min(piece, span.num_bytes - done), reinterpret_cast<void*>(stream));
  }
  if (error != 0)
    throw Status("device-copy-failed",
                 "the driver refused a copy to the GPU: CUDA error " + std::to_string(error));
}

}  // namespace

void register_copies(py::module_& m) {
  m.def("copy_pieces", &copy_pieces, py::arg("function"), py::arg("target"),
        py::arg("target_bytes"), py::arg("spans"), py::arg("piece_bytes"), py::arg("stream"),
        "Have function (cuMemcpyHtoDAsync, its address) copy arrays to offsets of the target, in "
        "pieces, on a stream.");
}

}  // namespace moechat
