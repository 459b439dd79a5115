// The matrix kernels on buffers of exactly their size: once on the heap, where the address
// sanitizer sees one byte too far on either side, and once up against a page that cannot be
// touched, for masked loads escape the sanitizer. The reference table gives the results.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "common/number_formats.h"
#include "cpu/dispatch.h"
#include "kernels/matmul/matmul.h"
#include "kernels/read/read.h"

namespace {

using namespace moechat;

struct Shape {
  int64_t rows, cols, row_origin, col_origin;
  int32_t block_rows, block_cols;
  int64_t gap;  // elements between rows; none behind the last
};

constexpr Shape kShapes[] = {
    {1, 1, 0, 0, 128, 128, 0},        {1, 7, 0, 0, 128, 128, 0},
    {7, 1, 0, 0, 128, 128, 3},        {3, 40, 0, 0, 128, 128, 0},
    {5, 72, 126, 0, 128, 128, 1},     {16, 136, 0, 57, 128, 128, 0},
    {33, 129, 100, 127, 128, 128, 7}, {4, 200, 0, 0, 128, 128, 0},
    {70, 328, 90, 3, 128, 128, 0},    {2, 7168, 0, 0, 128, 128, 0},
    {19, 136, 3, 9, 8, 40, 0},        {6, 700, 0, 1, 128, 129, 0},
    {1030, 33, 0, 0, 128, 128, 0},    {2, 32767, 0, 127, 128, 129, 0},
    {1, kMaxColumns, 0, 128, 128, 129, 0},
};

enum class Place { kHeap, kBeforeGuardPage };

struct Release {
  size_t mapped_bytes;  // 0 for the heap
  void operator()(uint8_t* p) const {
    if (mapped_bytes == 0)
      delete[] p;
    else
      munmap(p, mapped_bytes);
  }
};

// Exactly `size` bytes; on the heap `offset` bytes off alignment.
struct Buffer {
  Buffer(size_t size, size_t offset, Place place) {
    if (place == Place::kHeap) {
      memory = {new uint8_t[size + offset], Release{0}};
      start = memory.get() + offset;
      return;
    }
    constexpr size_t kPage = 4096;
    const size_t usable = (size + kPage - 1) / kPage * kPage;
    void* pages = mmap(nullptr, usable + kPage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    memory = {static_cast<uint8_t*>(pages), Release{usable + kPage}};
    CHECK(mprotect(memory.get() + usable, kPage, PROT_NONE) == 0);
    start = memory.get() + usable - size;
  }
  std::unique_ptr<uint8_t[], Release> memory{nullptr, Release{0}};
  uint8_t* start = nullptr;
};

struct Matrix {
  MatrixView view;
  Buffer data, scale, zeros;
};

struct Case {
  Format format;
  ScaleType scale_type = ScaleType::kF32;
  int32_t block_cols = 0;  // 0: the shape's; else block_rows is 1, or for transposed formats 32
  int32_t col_step = 1;
};

constexpr Case kCases[] = {
    {Format::kF32}, {Format::kF16}, {Format::kBF16}, {Format::kFP8},
    {Format::kFP8, ScaleType::kBF16, kMaxColumns}, {Format::kFP8, ScaleType::kE8M0, 32},
    {Format::kMXFP4, ScaleType::kE8M0, 32}, {Format::kInt4, ScaleType::kBF16, 32},
    {Format::kInt4, ScaleType::kF16, 64}, {Format::kInt4, ScaleType::kF32, 128},
    {Format::kAWQ, ScaleType::kF16, 1}, {Format::kGPTQ, ScaleType::kF16, 1},
    {Format::kQ8_0}, {Format::kQ4_0}, {Format::kQ5_0}, {Format::kQ4_K}, {Format::kQ5_K},
    {Format::kQ6_K}, {Format::kMXFP4Block}, {Format::kF32, ScaleType::kF32, 0, 2},
    {Format::kF16, ScaleType::kF32, 0, 2}, {Format::kBF16, ScaleType::kF32, 0, 2},
};

// Stores a value, or the power of two below it.
void put_scale(uint8_t* p, ScaleType type, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint16_t bf16 = f32_to_bf16(v);
  const auto f16 = static_cast<uint16_t>((bits >> 13) - (112u << 10));  // positive, not too small
  const auto e8m0 = static_cast<uint8_t>(bits >> 23);
  if (type == ScaleType::kF32) std::memcpy(p, &v, 4);
  if (type == ScaleType::kBF16) std::memcpy(p, &bf16, 2);
  if (type == ScaleType::kF16) std::memcpy(p, &f16, 2);
  if (type == ScaleType::kE8M0) *p = e8m0;
}

// Random bytes of one stored row whose values are at most about 1.6.
void fill_row(uint8_t* p, Format format, int64_t cols, int64_t col_step, std::mt19937& random) {
  const Unit unit = unit_of(format);
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  if (unit.cols == 1 && format != Format::kFP8 && format != Format::kGPTQ) {
    for (int64_t c = 0; c < cols; ++c) {
      uint8_t* element = p + c * col_step * unit.bytes;
      const float v = value(random);
      if (format == Format::kF16)
        put_scale(element, ScaleType::kF16, 0.01f + std::fabs(v));
      else
        put_scale(element, format == Format::kF32 ? ScaleType::kF32 : ScaleType::kBF16, v);
    }
    return;
  }
  const int64_t units = (cols + unit.cols - 1) / unit.cols;
  for (int64_t i = 0; i < units * unit.bytes; ++i) {
    p[i] = static_cast<uint8_t>(random());
    if (format == Format::kFP8 && (p[i] & 127) == 127) p[i] = 0;  // NaN
  }
  for (int64_t u = 0; u < units; ++u, p += unit.bytes) {
    if (format == Format::kQ8_0) put_scale(p, ScaleType::kF16, 0.008f);
    if (format == Format::kQ4_0) put_scale(p, ScaleType::kF16, 0.1f);
    if (format == Format::kQ5_0) put_scale(p, ScaleType::kF16, 0.05f);
    if (format == Format::kQ4_K || format == Format::kQ5_K) {
      put_scale(p, ScaleType::kF16, 4e-4f);
      put_scale(p + 2, ScaleType::kF16, 0.01f);
    }
    if (format == Format::kQ6_K) put_scale(p + 208, ScaleType::kF16, 2e-4f);
    if (format == Format::kMXFP4Block) put_scale(p, ScaleType::kE8M0, 0.25f);
  }
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The shape, rounded up to what the format can have.
Shape fit(Shape s, const Case& c) {
  const int64_t unit = c.format == Format::kGPTQ ? 8 : unit_of(c.format).cols;
  if (c.format == Format::kGPTQ) s.rows = round_up(s.rows, 8);
  if (c.format != Format::kInt4) s.cols = round_up(s.cols, unit);
  s.col_origin = unit > 8 ? 0 : round_up(s.col_origin, unit);
  if (c.block_cols != 0) {
    s.block_rows = c.block_cols == 1 ? 32 : 1;
    s.block_cols = c.block_cols;
  }
  return s;
}

Matrix make_matrix(const Shape& shape, const Case& c, Place place, std::mt19937& random) {
  const Shape s = fit(shape, c);
  const Unit unit = unit_of(c.format);
  const int64_t stored_rows = c.format == Format::kGPTQ ? s.rows / 8 : s.rows;
  const int64_t row_bytes = unit.cols == 1 ? ((s.cols - 1) * c.col_step + 1) * unit.bytes
                                           : (s.cols + unit.cols - 1) / unit.cols * unit.bytes;
  const int64_t pitch = row_bytes + s.gap * unit.bytes;
  const int64_t grid_rows = (s.row_origin + s.rows + s.block_rows - 1) / s.block_rows;
  const int64_t grid_cols = (s.col_origin + s.cols + s.block_cols - 1) / s.block_cols;
  const int64_t item = scale_bytes(c.scale_type), zeros_bytes = (grid_cols + 7) / 8 * 4;
  const size_t offset = s.gap > 0 ? 1 : 0;
  const size_t data_bytes = static_cast<size_t>((stored_rows - 1) * pitch + row_bytes);
  Matrix m{{},
           Buffer(data_bytes, offset, place),
           Buffer(static_cast<size_t>(item * grid_rows * grid_cols), offset, place),
           Buffer(static_cast<size_t>(grid_rows * zeros_bytes), offset, place)};
  std::memset(m.data.start, 0xff, data_bytes);
  for (int64_t r = 0; r < stored_rows; ++r)
    fill_row(m.data.start + r * pitch, c.format, s.cols, c.col_step, random);
  std::uniform_real_distribution<float> value(0.5f, 2.0f);
  const bool small = c.format == Format::kFP8;  // its codes reach 448, others 16
  for (int64_t i = 0; i < grid_rows * grid_cols; ++i)
    put_scale(m.scale.start + item * i, c.scale_type, (small ? 1e-3f : 0.04f) * value(random));
  for (int64_t i = 0; i < grid_rows * zeros_bytes; ++i)
    m.zeros.start[i] = static_cast<uint8_t>(random());
  m.view.format = c.format;
  m.view.transposed = c.block_cols == 1 || c.col_step == 2;
  m.view.col_step = c.col_step;
  m.view.data = m.data.start;
  m.view.rows = s.rows;
  m.view.cols = s.cols;
  m.view.row_stride_bytes = pitch;
  m.view.scale_type = c.scale_type;
  m.view.scale = m.scale.start;
  m.view.scale_row_stride_bytes = item * grid_cols;
  m.view.block_rows = s.block_rows;
  m.view.block_cols = s.block_cols;
  m.view.row_origin = s.row_origin;
  m.view.col_origin = s.col_origin;
  m.view.zeros = m.zeros.start;
  m.view.zeros_row_stride_bytes = zeros_bytes;
  return m;
}

// One buffer a row: no row can hide that another is overrun.
struct Rows {
  Rows(int64_t count, int64_t width, float fill, Place place) {
    for (int64_t r = 0; r < count; ++r) {
      storage.emplace_back(static_cast<size_t>(4 * width), 0, place);
      pointers.push_back(reinterpret_cast<float*>(storage.back().start));
      for (int64_t i = 0; i < width; ++i) pointers.back()[i] = fill;
    }
  }
  std::vector<Buffer> storage;
  std::vector<float*> pointers;
};

enum class Kernel { kGemv, kGemm, kTransposed };

struct Scratch {
  Scratch() : start(::operator new(kMatmulScratchBytes, std::align_val_t{64})) {}
  ~Scratch() { ::operator delete(start, std::align_val_t{64}); }
  void* start;
};

void run(const MatmulKernels& table, Kernel kernel, const MatrixView& w, int64_t begin, int64_t end,
         Compute compute, const Rows& x, const Rows& y) {
  static const Scratch scratch;
  std::memset(scratch.start, 0xff, kMatmulScratchBytes);  // NaN: nothing may rely on zeros
  const int64_t rows = static_cast<int64_t>(x.pointers.size());
  const float* const* inputs = x.pointers.data();
  float* const* outputs = y.pointers.data();
  switch (kernel) {
    case Kernel::kGemv:
      table.gemv(w, begin, end, compute, inputs, static_cast<int>(rows), outputs, scratch.start,
                 nullptr);
      return;
    case Kernel::kGemm:
      table.gemm(w, begin, end, compute, inputs, rows, outputs, scratch.start);
      return;
    case Kernel::kTransposed:
      table.gemv_transposed(w, begin, end, compute, inputs, rows, outputs, scratch.start);
      return;
  }
}

// Same as the reference within float32 rounding of a sum of magnitudes, and nothing outside
// [begin, end) touched.
bool agrees(const Matrix& m, Kernel kernel, Compute compute, const Rows& x, const Rows& y,
            int64_t begin, int64_t end) {
  const bool transposed = kernel == Kernel::kTransposed;
  const int64_t outputs = transposed ? m.view.cols : m.view.rows;
  const int64_t terms = transposed ? m.view.rows : m.view.cols;
  const int64_t rows = static_cast<int64_t>(x.pointers.size());
  Rows wanted(rows, outputs, 77.0f, Place::kHeap);
  run(kMatmulRef, kernel, m.view, begin, end, compute, x, wanted);
  // |x| <= 1, and |w| <= 1.6.
  const auto count = static_cast<float>(terms);
  const float bound = 1.2e-6f * std::sqrt(count) * count / 4;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < outputs; ++i) {
      const float a = y.pointers[r][i], b = wanted.pointers[r][i];
      if (i < begin || i >= end ? a != 77.0f : !(std::fabs(a - b) <= bound)) return false;
    }
  return true;
}

// XINUSE of XTILEDATA: whether a context switch would have them to save. Only where AMX runs.
bool tile_registers_in_use() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low >> 18 & 1) != 0;
}

void check_kernel(const InstructionSet& set, Kernel kernel, const Matrix& m, Place place,
                  std::mt19937& random) {
  const bool transposed = kernel == Kernel::kTransposed;
  const int64_t inputs = transposed ? m.view.rows : m.view.cols;
  const int64_t outputs = transposed ? m.view.cols : m.view.rows;
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  // Everything is slow under a sanitizer: few rows where the matrix is large or one of many.
  std::vector<int64_t> counts = {1, 9};
  const bool large = m.view.rows * m.view.cols > 20000 || m.view.format > Format::kFP8;
  if (!large) counts = {1, 2, 7, 8, 16};
  if (kernel == Kernel::kGemm && m.view.rows * m.view.cols < 50000) counts.push_back(19);
  for (const int64_t rows : counts) {
    Rows x(rows, inputs, 0.0f, place);
    for (float* row : x.pointers)
      for (int64_t i = 0; i < inputs; ++i) row[i] = value(random);
    for (const Compute compute : {Compute::kBF16, Compute::kExact})
      for (const bool whole : {true, false}) {
        const int64_t begin = whole ? 0 : outputs / 3;
        const int64_t end = whole ? outputs : outputs - outputs / 4;
        Rows y(rows, outputs, 77.0f, place);
        run(*set.matmul, kernel, m.view, begin, end, compute, x, y);
        if (std::strcmp(set.name, "amx") == 0) CHECK(!tile_registers_in_use());
        const bool good = agrees(m, kernel, compute, x, y, begin, end);
        if (!good)
          std::fprintf(stderr, "%s kernel %d format %d: %lld x %lld, %lld rows, [%lld, %lld)\n",
                       set.name, static_cast<int>(kernel), static_cast<int>(m.view.format),
                       static_cast<long long>(m.view.rows), static_cast<long long>(m.view.cols),
                       static_cast<long long>(rows), static_cast<long long>(begin),
                       static_cast<long long>(end));
        CHECK(good);
      }
  }
}

void check_vector(const VectorKernels& kernels, int64_t n) {
  const Place place = Place::kHeap;
  Rows x(1, n, 0.5f, place), w(1, n, 2.0f, place), y(1, n, 1.0f, place);
  float *a = x.pointers[0], *b = w.pointers[0], *c = y.pointers[0];
  kernels.axpy(2.0f, a, n, c);
  kernels.scale(c, 3.0f, n);
  CHECK(c[0] == 6.0f && c[n - 1] == 6.0f);
  kernels.rms_norm(a, b, 0.0f, n, c);
  CHECK(std::fabs(c[0] - 2.0f) < 1e-5f && std::fabs(c[n - 1] - 2.0f) < 1e-5f);
  kernels.silu_mul(a, b, n, a);  // in place
  CHECK(std::fabs(a[n - 1] - 0.62245933f) < 1e-6f);
  CHECK(kernels.max(b, n) == 2.0f);
  CHECK(std::fabs(kernels.exp_sum(b, 2.0f, n) - static_cast<float>(n)) < 1e-5f);
  const std::unique_ptr<uint16_t[]> bits(new uint16_t[static_cast<size_t>(n)]);
  kernels.to_bf16(b, n, bits.get());
  CHECK(bits[static_cast<size_t>(n - 1)] == 0x3f80);
}

void check_reading(const InstructionSet& set) {
  const std::string name = set.name;
  for (const size_t size : {0, 1, 7, 64, 255, 511, 513, 1300}) {
    const std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 37 + 200);
    const auto n = static_cast<int64_t>(size);
    const uint64_t wanted = read_checksum_ref(bytes.get(), n);
    for (const bool prefetch : {false, true}) {
      if (name == "ref") CHECK(read_checksum_ref(bytes.get(), n, prefetch) == wanted);
      if (name == "avx2") CHECK(read_checksum_avx2(bytes.get(), n, prefetch) == wanted);
      if (name == "avx512") CHECK(read_checksum_avx512(bytes.get(), n, prefetch) == wanted);
    }
  }
}

}  // namespace

void test_matmul() {
  const std::string before = active_instruction_set().name;
  for (const std::string& name : supported_instruction_sets()) {
    force_instruction_set(name);
    const InstructionSet& set = active_instruction_set();
    CHECK(set.name == name);
    std::mt19937 random(7);
    for (const Shape& shape : kShapes)
      for (const Case& c : kCases)
        for (const Place place : {Place::kHeap, Place::kBeforeGuardPage}) {
          // Long sums are checked with the formats that need no rounding up of the shape.
          if (shape.rows * shape.cols > 8000 && c.format > Format::kFP8) continue;
          const Matrix m = make_matrix(shape, c, place, random);
          for (const Kernel kernel : {Kernel::kGemv, Kernel::kGemm, Kernel::kTransposed})
            check_kernel(set, kernel, m, place, random);
        }
    for (const int64_t n : {1, 7, 15, 16, 17, 33, 333}) check_vector(*set.vector, n);
    check_reading(set);
  }
  force_instruction_set(before);
}
