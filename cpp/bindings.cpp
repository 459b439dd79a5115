// The extension module: registers every part and translates Status into one Python exception.
#include "bindings.h"

#include "common/status.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "moechat's kernels, KV cache, decode step and prefill";
  // NativeError(name, message): moechat.errors maps the stable name to its class.
  static py::object native_error =
      py::reinterpret_steal<py::object>(PyErr_NewException("moechat._native.NativeError",
                                                           PyExc_RuntimeError, nullptr));
  m.attr("NativeError") = native_error;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const moechat::Status& status) {
      const py::tuple arguments = py::make_tuple(status.name, status.what());
      PyErr_SetObject(native_error.ptr(), arguments.ptr());
    }
  });
  moechat::register_kernels(m);
  moechat::register_sample(m);
  moechat::register_model(m);
  moechat::register_experts(m);
  moechat::register_draft(m);
  moechat::register_resident(m);
  moechat::register_engine(m);
  moechat::register_generation(m);
  moechat::register_mailbox(m);
  moechat::register_copies(m);
}
