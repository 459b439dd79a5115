// Compact copies: the same bits, from memory that ends where the copy does (the sanitizer looks).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "model/compact_copy.h"

namespace {

using namespace moechat;

constexpr int64_t kRows = 300, kCols = 512;

// Stored bytes, scales and zeros of a matrix that is larger than what is copied.
struct Parent {
  std::vector<uint8_t> data = std::vector<uint8_t>(kRows * kCols * 4);
  std::vector<uint16_t> scale = std::vector<uint16_t>(kRows * kCols, 0x3f80);  // bf16 1
  std::vector<uint8_t> zeros = std::vector<uint8_t>(kRows * kCols);
  MatrixView view;

  Parent(Format format, int block_rows, int block_cols, bool transposed) {
    std::minstd_rand random(3);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random() % 0x70);  // no NaN, small
    for (uint16_t& bits : scale) bits = static_cast<uint16_t>(0x3f00 + random() % 256);
    for (uint8_t& byte : zeros) byte = static_cast<uint8_t>(random());
    const Unit unit = unit_of(format);
    view.format = format;
    view.transposed = transposed;
    view.scale_type = ScaleType::kBF16;
    view.data = data.data();
    view.rows = format == Format::kGPTQ ? kRows / 8 * 8 : kRows;
    view.cols = kCols;
    view.row_stride_bytes = kCols / unit.cols * unit.bytes;
    view.block_rows = block_rows;
    view.block_cols = block_cols;
    if (block_rows == 0) return;
    view.scale = reinterpret_cast<const uint8_t*>(scale.data());
    view.scale_row_stride_bytes = 2 * (kCols / block_cols + 1);
    if (block_cols != 1) return;
    view.zeros = zeros.data();
    view.zeros_row_stride_bytes = kCols / 2;
  }
};

void check_copy(const MatrixView& slice) {
  const size_t bytes = compact_bytes(slice);
  // An allocation of its own, so that a byte read behind the end is seen.
  const std::unique_ptr<uint8_t, void (*)(void*)> memory(
      static_cast<uint8_t*>(std::aligned_alloc(64, bytes)), std::free);
  const MatrixView copy = compact_copy(slice, memory.get());
  CHECK(copy.rows == slice.rows && copy.cols == slice.cols && copy.col_step == 1);
  std::vector<float> x(static_cast<size_t>(std::max(slice.rows, slice.cols)));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) - 6;
  const float* inputs = x.data();
  const std::unique_ptr<uint8_t, void (*)(void*)> scratch(
      static_cast<uint8_t*>(std::aligned_alloc(64, kMatmulScratchBytes)), std::free);
  for (const std::string& name : supported_instruction_sets()) {
    force_instruction_set(name);
    const MatmulKernels& kernels = *active_instruction_set().matmul;
    std::vector<float> wanted(x.size()), got(x.size());
    float* y = wanted.data();
    const auto multiply = [&](const MatrixView& w) {
      if (w.transposed)
        kernels.gemv_transposed(w, 0, w.cols, Compute::kBF16, &inputs, 1, &y, scratch.get());
      else
        kernels.gemv(w, 0, w.rows, Compute::kBF16, &inputs, 1, &y, scratch.get(), nullptr);
    };
    multiply(slice);
    y = got.data();
    multiply(copy);
    CHECK(std::memcmp(wanted.data(), got.data(), 4 * x.size()) == 0);
  }
  force_instruction_set(supported_instruction_sets()[0]);
}

}  // namespace

void test_compact_copy() {
  const Parent fp8(Format::kFP8, 128, 128, false);
  check_copy(fp8.view.row_slice(100, 60).col_slice(120, 200));
  check_copy(fp8.view.row_slice(128, 128).col_slice(256, 256));
  const Parent mxfp4(Format::kMXFP4, 1, 32, false);
  check_copy(mxfp4.view.row_slice(3, 40).col_slice(96, 128));
  check_copy(mxfp4.view.col_slice(18, 70));
  const Parent int4(Format::kInt4, 1, 128, false);
  check_copy(int4.view.row_slice(7, 33).col_slice(128, 61));
  const Parent q8_0(Format::kQ8_0, 0, 1, false);
  check_copy(q8_0.view.row_slice(1, 34).col_slice(64, 96));
  const Parent awq(Format::kAWQ, 32, 1, true), gptq(Format::kGPTQ, 32, 1, true);
  check_copy(awq.view.row_slice(40, 70).col_slice(24, 48));
  check_copy(gptq.view.row_slice(40, 72).col_slice(24, 48));
  std::vector<int32_t> index(kRows);
  for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(i * 7 % 9);
  MatrixView indexed = gptq.view;
  indexed.group_index = reinterpret_cast<const uint8_t*>(index.data());
  check_copy(indexed.row_slice(16, 48).col_slice(8, 64));
  Parent stepped(Format::kBF16, 0, 1, true);
  stepped.view.col_step = 2;
  stepped.view.cols /= 2;
  check_copy(stepped.view.row_slice(5, 50).col_slice(9, 77));
}
