// Bindings of the mailboxes and of the server that computes experts for steps on a GPU.
#include <memory>

#include "bindings.h"
#include "common/status.h"
#include "decode/expert_server.h"
#include "decode/mailbox.h"

namespace py = pybind11;

namespace moechat {
namespace {

py::dict layout_dict(int64_t max_rows, int64_t hidden, int64_t experts_per_token) {
  const MailboxLayout layout = mailbox_layout(max_rows, hidden, experts_per_token);
  return py::dict(py::arg("request") = layout.request, py::arg("reply") = layout.reply,
                  py::arg("abort") = layout.abort, py::arg("rows") = layout.rows,
                  py::arg("x") = layout.x, py::arg("ids") = layout.ids,
                  py::arg("weights") = layout.weights, py::arg("y") = layout.y,
                  py::arg("total") = layout.total);
}

const char* name_of(ServeEnd end) {
  switch (end) {
    case ServeEnd::kStep: return "step";
    case ServeEnd::kRequests: return "requests";
    case ServeEnd::kInterrupt: return "interrupt";
    case ServeEnd::kTimeout: return "timeout";
    case ServeEnd::kAborted: return "aborted";
  }
  throw Status("bad-argument", "serve ended in an unknown way");
}

void check_mailbox(const ExpertServer& server, int64_t mailbox) {
  check(mailbox >= 0 && mailbox < server.num_mailboxes(), "mailbox out of range");
}

}  // namespace

void register_mailbox(py::module_& m) {
  m.def("mailbox_layout", &layout_dict, py::arg("max_rows"), py::arg("hidden"),
        py::arg("experts_per_token"),
        "Byte offsets of a mailbox's words and arrays, by name, and the bytes of all: total.");

  py::class_<ExpertServer>(m, "ExpertServer", "Routed experts for decode steps on a GPU.")
      .def(py::init([](const PyModel& model, ThreadPool& pool,
                       const std::vector<std::pair<uintptr_t, int64_t>>& mailboxes,
                       int64_t max_rows) {
             const ModelDims& d = model.model.dims;
             const MailboxLayout layout = mailbox_layout(max_rows, d.hidden, d.experts_per_token);
             std::vector<Mailbox> boxes;
             for (const auto& [address, bytes] : mailboxes)
               boxes.emplace_back(reinterpret_cast<uint8_t*>(address), bytes, layout);
             return std::make_unique<ExpertServer>(model.model, pool, boxes);
           }),
           py::arg("model"), py::arg("pool"), py::arg("mailboxes"), py::arg("max_rows"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           "mailboxes: (address, bytes) of each; the memory stays the caller's and must outlive "
           "the server.")
      .def("serve",
           [](ExpertServer& self, const CancelFlag& interrupt, double timeout_seconds,
              int64_t max_requests) {
             check(timeout_seconds >= 0 && timeout_seconds <= 3600, "a timeout of 0..3600 seconds");
             check(max_requests >= 0, "the number of requests is negative");
             Served served{};
             {
               const py::gil_scoped_release release;
               served = self.serve(interrupt, timeout_seconds, max_requests);
             }
             return py::make_tuple(
                 served.end == ServeEnd::kStep ? py::object(py::int_(served.mailbox)) : py::none(),
                 name_of(served.end));
           },
           py::arg("interrupt"), py::arg("timeout_seconds"), py::arg("max_requests") = 0,
           "(the mailbox whose step is complete or None, why it ended)")
      .def("abort",
           [](ExpertServer& self, int64_t mailbox) {
             check_mailbox(self, mailbox);
             self.give_up(mailbox);
           },
           py::arg("mailbox"), "The client of the mailbox waits no longer. From any thread.")
      .def("aborted",
           [](const ExpertServer& self, int64_t mailbox) {
             check_mailbox(self, mailbox);
             return self.aborted(mailbox);
           },
           py::arg("mailbox"))
      .def("reset",
           [](ExpertServer& self, int64_t mailbox, uint32_t sequence) {
             check_mailbox(self, mailbox);
             self.reset(mailbox, sequence);
           },
           py::arg("mailbox"), py::arg("sequence") = 0,
           "As new: the next request is number sequence + 1, of the first MoE layer.")
      .def("set_gpu_experts",
           [](ExpertServer& self, int64_t moe_layer, const std::vector<int32_t>& ids) {
             check(moe_layer >= 0 && moe_layer < self.num_moe_layers(), "layer out of range");
             for (const int32_t id : ids)
               check(id >= 0 && id < self.num_experts(), "an expert id is out of range");
             self.set_gpu_experts(moe_layer, ids);
           },
           py::arg("moe_layer"), py::arg("ids"),
           "Experts of the n-th MoE layer that are left out of y from now on.")
      .def_property_readonly("num_moe_layers", &ExpertServer::num_moe_layers)
      .def_property_readonly("times", [](const ExpertServer& self) {
        const ServeTimes& times = self.times();
        return py::dict(py::arg("experts_seconds") = times.experts_seconds,
                        py::arg("waiting_seconds") = times.waiting_seconds,
                        py::arg("num_requests") = times.num_requests);
      });
}

}  // namespace moechat
