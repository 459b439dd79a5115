// Binding of the KV codec: rows of a layer, chosen by number, to the bytes of one tier and back.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_kernels.h"
#include "common/number_formats.h"
#include "cpu/dispatch.h"

namespace py = pybind11;

namespace moechat {
namespace {

constexpr int64_t kMaxRowElements = int64_t{1} << 20;

using PartList = std::vector<std::tuple<int64_t, int64_t, std::string>>;

KVCode parse_code(const std::string& name) {
  if (name == "f16") return KVCode::kF16;
  if (name == "int8") return KVCode::kInt8;
  check(name == "int4", "a code is f16, int8 or int4");
  return KVCode::kInt4;
}

// Parts in the order of their payloads, and what they add up to.
struct Parts {
  std::vector<KVPart> list;
  int64_t payload_bytes = 0, num_scales = 0, widest = 0;
};

// They must lie in the row and rise, so that no element is written twice.
Parts parse_parts(const PartList& given, int64_t row_width) {
  Parts parts;
  int64_t free = 0;
  for (const auto& [begin, width, code] : given) {
    check(begin >= free && width >= 1 && width <= row_width && begin <= row_width - width,
          "parts must rise, hold something and lie in the row");
    free = begin + width;
    parts.list.push_back({begin, width, parse_code(code)});
    parts.payload_bytes += parts.list.back().payload_bytes();
    parts.num_scales += parts.list.back().has_scale() ? 1 : 0;
    parts.widest = std::max(parts.widest, width);
  }
  return parts;
}

// Rows [n, width] of uint16 (BF16) or float32, each row contiguous and aligned.
struct Rows {
  char* base;
  int64_t stride, count, width;
  bool bf16;
  void* row(int64_t i) const { return base + i * stride; }
};

Rows parse_rows(const py::array& array) {
  const bool bf16 = is_type(array, 'u', 2);
  check(bf16 || is_type(array, 'f', 4), "rows must be uint16 (BF16) or float32");
  const int64_t bytes = bf16 ? 2 : 4;
  check(array.ndim() == 2 && array.shape(1) >= 1 && array.shape(1) <= kMaxRowElements &&
            (array.size() < 2 || array.shape(1) == 1 || array.strides(1) == bytes) &&
            (array.size() < 2 || array.strides(0) % bytes == 0) &&
            reinterpret_cast<uintptr_t>(array.data()) % bytes == 0,
        "rows must be [n, width], each row contiguous");
  return {static_cast<char*>(const_cast<void*>(array.data())), array.strides(0), array.shape(0),
          array.shape(1), bf16};
}

bool is_dense(const py::array& array, char kind, int64_t element_bytes, int64_t dimensions) {
  return is_type(array, kind, element_bytes) && array.ndim() == dimensions &&
         (array.flags() & py::array::c_style) != 0 &&
         reinterpret_cast<uintptr_t>(array.data()) % element_bytes == 0;
}

// Row numbers that rise: each within the rows and none twice.
const int64_t* parse_chosen(const py::array& chosen, const Rows& rows) {
  check(is_dense(chosen, 'i', 8, 1), "chosen rows must be int64 [m], contiguous");
  const auto* numbers = static_cast<const int64_t*>(chosen.data());
  for (int64_t i = 0; i < chosen.size(); ++i)
    check(numbers[i] >= (i == 0 ? 0 : numbers[i - 1] + 1) && numbers[i] < rows.count,
          "chosen rows must rise and lie within the rows");
  return numbers;
}

std::vector<float> parse_centre(const py::object& given, int64_t width) {
  if (given.is_none()) return {};
  check(py::isinstance<py::array>(given), "the centre must be an array");
  const auto array = py::reinterpret_borrow<py::array>(given);
  check(is_dense(array, 'f', 2, 1) && array.size() <= width,
        "the centre must be float16, contiguous, no longer than a row");
  const auto* halves = static_cast<const uint16_t*>(array.data());
  std::vector<float> centre;
  for (int64_t i = 0; i < array.size(); ++i) {
    check((halves[i] & 0x7c00u) != 0x7c00u, "the centre must be finite");
    centre.push_back(f16_to_f32(halves[i]));
  }
  return centre;
}

KVRowCode row_code(const Parts& parts, const Rows& rows, const std::vector<float>& centre) {
  return {parts.list.data(), static_cast<int64_t>(parts.list.size()), rows.bf16, centre.data(),
          static_cast<int64_t>(centre.size())};
}

py::array halves(std::vector<py::ssize_t> shape) { return py::array(py::dtype("f2"), shape); }

// payload uint8 [m, bytes], scales float16 [m, quantised parts].
std::pair<py::array, py::array> kv_encode(const py::array& rows, const py::array& chosen,
                                          const PartList& part_list, const py::object& centre) {
  const Rows from = parse_rows(rows);
  const Parts parts = parse_parts(part_list, from.width);
  const int64_t* numbers = parse_chosen(chosen, from);
  const std::vector<float> middle = parse_centre(centre, from.width);
  const KVRowCode code = row_code(parts, from, middle);
  const int64_t count = chosen.size();
  py::array_t<uint8_t> payload({count, parts.payload_bytes});
  py::array scales = halves({count, parts.num_scales});
  uint8_t* bytes = payload.mutable_data();
  auto* scale = static_cast<uint16_t*>(scales.mutable_data());
  {
    const py::gil_scoped_release released;
    const KVCodecKernels& kernels = *active_instruction_set().kv_codec;
    std::vector<float> scratch(static_cast<size_t>(parts.widest));
    for (int64_t i = 0; i < count; ++i)
      if (!kernels.encode(code, from.row(numbers[i]), scratch.data(),
                          bytes + i * parts.payload_bytes, scale + i * parts.num_scales))
        throw Status("kv-not-encodable", "row " + std::to_string(numbers[i]) +
                                             " holds a value that is not finite or too large");
  }
  return {payload, scales};
}

void kv_decode(const py::array& payload, const py::array& scales, const PartList& part_list,
               const py::object& centre, py::array& rows, const py::array& chosen) {
  const Rows to = parse_rows(rows);
  check(rows.writeable(), "rows are read-only");
  const Parts parts = parse_parts(part_list, to.width);
  const int64_t* numbers = parse_chosen(chosen, to);
  const int64_t count = chosen.size();
  check(is_dense(payload, 'u', 1, 2) && payload.shape(0) == count &&
            payload.shape(1) == parts.payload_bytes,
        "the payload must be uint8 [chosen rows, bytes of the parts]");
  check(is_dense(scales, 'f', 2, 2) && scales.shape(0) == count &&
            scales.shape(1) == parts.num_scales,
        "scales must be float16 [chosen rows, quantised parts]");
  const std::vector<float> middle = parse_centre(centre, to.width);
  const KVRowCode code = row_code(parts, to, middle);
  const auto* bytes = static_cast<const uint8_t*>(payload.data());
  const auto* scale = static_cast<const uint16_t*>(scales.data());
  const py::gil_scoped_release released;
  const KVCodecKernels& kernels = *active_instruction_set().kv_codec;
  for (int64_t i = 0; i < count; ++i)
    if (!kernels.decode(code, bytes + i * parts.payload_bytes, scale + i * parts.num_scales,
                        to.row(numbers[i])))
      throw Status("bad-argument", "a scale or a float16 value is not finite");
}

// The mean of the chosen rows' first `width` elements, float16; zeros when none is chosen.
py::array kv_centre(const py::array& rows, const py::array& chosen, int64_t width) {
  const Rows from = parse_rows(rows);
  check(width >= 0 && width <= from.width, "the width lies outside the rows");
  const int64_t* numbers = parse_chosen(chosen, from);
  const int64_t count = chosen.size();
  py::array centre = halves({width});
  auto* means = static_cast<uint16_t*>(centre.mutable_data());
  const py::gil_scoped_release released;
  const KVCodecKernels& kernels = *active_instruction_set().kv_codec;
  std::vector<float> sums(static_cast<size_t>(width));
  for (int64_t i = 0; i < count; ++i)
    kernels.add(from.row(numbers[i]), from.bf16, width, sums.data());
  for (int64_t i = 0; i < width; ++i) {
    const float total = sums[static_cast<size_t>(i)];
    means[i] = f32_to_f16(total / static_cast<float>(std::max<int64_t>(count, 1)));
    if ((means[i] & 0x7c00u) == 0x7c00u)
      throw Status("kv-not-encodable",
                   "channel " + std::to_string(i) + " has a mean that is not finite or too large");
  }
  return centre;
}

}  // namespace

void register_kv_codec(py::module_& m) {
  m.def("kv_encode", &kv_encode, "Chosen rows as payload and scales (kernels/kv_codec/kv_codec.h).",
        py::arg("rows"), py::arg("chosen"), py::arg("parts"), py::arg("centre") = py::none());
  m.def("kv_decode", &kv_decode, "Writes the parts of chosen rows.", py::arg("payload"),
        py::arg("scales"), py::arg("parts"), py::arg("centre").none(true), py::arg("rows"),
        py::arg("chosen"));
  m.def("kv_centre", &kv_centre, "Mean of the chosen rows' first elements as float16.",
        py::arg("rows"), py::arg("chosen"), py::arg("width"));
}

}  // namespace moechat
