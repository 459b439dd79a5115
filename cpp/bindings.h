// Shared by the binding files: views that keep their arrays alive, and array checks.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "common/matrix_view.h"
#include "common/status.h"
#include "model/model.h"

namespace moechat {

// Status "bad-argument" unless the condition holds. Takes no std::string: tens of thousands of
// views are made while a model is opened.
inline void check(bool condition, const char* message) {
  if (!condition) throw Status("bad-argument", message);
}

// A MatrixView as Python sees it; `owners` keeps the arrays alive that it points into.
struct PyMatrixView {
  MatrixView view;
  pybind11::object owners;
};

// A Model as Python sees it; `owners` keeps its views alive.
struct PyModel {
  Model model;
  pybind11::object owners;
};

// "bf16" or "exact"; else Status "bad-argument".
Compute parse_compute(const std::string& name);

// "sigmoid", "softmax" or "softmax_chosen"; else Status "bad-argument".
Scoring parse_scoring(const std::string& name);

void register_kernels(pybind11::module_& m);
void register_sample(pybind11::module_& m);
void register_model(pybind11::module_& m);
void register_experts(pybind11::module_& m);
void register_draft(pybind11::module_& m);
void register_resident(pybind11::module_& m);
void register_engine(pybind11::module_& m);
void register_generation(pybind11::module_& m);
void register_mailbox(pybind11::module_& m);
void register_copies(pybind11::module_& m);

}  // namespace moechat
