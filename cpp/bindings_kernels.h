// Shared by the kernel binding files.
#pragma once
#include "bindings.h"

namespace moechat {

// Whether elements have this kind ('f', 'u') and size, in this machine's byte order.
inline bool is_type(const pybind11::array& array, char kind, int64_t element_bytes) {
  const pybind11::dtype dtype = array.dtype();
  const char order = dtype.byteorder();
  return dtype.kind() == kind && dtype.itemsize() == element_bytes &&
         (order == '=' || order == '|' || order == '<');
}

// MatrixView.
void register_view(pybind11::module_& m);
// Vector, router and rope kernels, for tests.
void register_vector_kernels(pybind11::module_& m);
// KV rows to packet bytes and back.
void register_kv_codec(pybind11::module_& m);
// Plain reading.
void register_read(pybind11::module_& m);

}  // namespace moechat
