// Contract of the matrix kernels. Shapes: R rows of activations, N weight rows, K weight columns.
//
//   gemv             y[r][n] = sum_k x[r][k] W[n][k]     1..16 rows, decode class
//   gemm             the same for any number of rows, prefill class
//   gemv_transposed  y[r][k] = sum_n x[r][n] W[n][k]     any number of rows
//
// Inputs and outputs are float32. With Compute::kBF16 every input x is rounded to BF16 (nearest
// even) before it is multiplied; weights are exact, products and sums float32. With kExact x is
// used as it is. Weights are never rounded. FP8 NaN codes decode to NaN.
//
// kAvx512bf16 and kAmx, up to 16 rows, kBF16, weights that are integers times scales (4-bit codes,
// GGUF's K-quants): rounded x is multiplied in 16-bit fixed point, in units of 2^(e - 14), e the
// exponent of the largest of 256 columns, -111 at least. What is within 128 times of it stays as it
// is, smaller values are rounded to 2^-15 of it.
//
// Decode class (gemv, and gemv_transposed): the bits of a row of y depend on that row of x, W and
// the instruction set alone, never on the other rows nor on how the range was split (design 3.6).
//
// W is the stored matrix, whatever its orientation as a weight (product.h multiplies as a layer
// means it).
//
// All pointers are to float; x[r] has K (or N) readable elements. Output ranges are absolute:
// y[r][n] is written for n in [begin, end) and nothing else is touched. `scratch` has
// kMatmulScratchBytes, aligned to 64, private to the calling thread. No allocation, no exceptions.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/matrix_view.h"

namespace moechat {

enum class Compute : uint8_t { kBF16, kExact };

constexpr int kMaxGemvRows = 16;
constexpr int64_t kMaxColumns = 65536;  // bindings refuse wider matrices
constexpr size_t kMatmulScratchBytes = (kMaxGemvRows + 5) * kMaxColumns * 4;
constexpr size_t kKeptInputsBytes = 512 * 1024;  // of one x; larger ones are not kept

// Inputs as a gemv kernel wants them, kept by a worker from one task to the next: tasks of a phase
// share x. Whoever calls names x in `wanted`, by a number that no other x ever has.
struct KeptInputs {
  uint64_t wanted = 0;
  void* memory = nullptr;  // kKeptInputsBytes, aligned to 64
  // The weight rows that will probably be read next, or null: they are fetched while the last of
  // these are multiplied, for whatever memory is asked for first comes late.
  const uint8_t* next_rows = nullptr;
  int64_t next_stride_bytes = 0;

  void expect(const MatrixView& w, int64_t row) {
    const bool there = !w.transposed && row < w.rows;
    next_rows = there ? w.data + row * w.row_stride_bytes : nullptr;
    next_stride_bytes = w.row_stride_bytes;
  }

  // Whether x has room, padded as any kernel pads it.
  static bool fits(const MatrixView& w, int64_t num_rows) {
    return static_cast<size_t>(num_rows * (w.cols + 1024)) * 4 <= kKeptInputsBytes;
  }
  // Whether memory holds the wanted x as `kernel` prepares it for weights like w; if not, notes
  // that it is about to.
  bool ready(const MatrixView& w, Compute compute, int num_rows, const void* kernel) {
    const Key key{wanted,          kernel,           w.cols,        w.col_origin, num_rows,
                  w.block_cols,    w.col_step,       w.format,      compute};
    const bool same = key.x == held_.x && key.kernel == held_.kernel && key.cols == held_.cols &&
                      key.col_origin == held_.col_origin && key.num_rows == held_.num_rows &&
                      key.block_cols == held_.block_cols && key.col_step == held_.col_step &&
                      key.format == held_.format && key.compute == held_.compute;
    held_ = key;
    return same;
  }

 private:
  struct Key {
    uint64_t x;
    const void* kernel;
    int64_t cols, col_origin, num_rows;
    int32_t block_cols, col_step;
    Format format;
    Compute compute;
  };
  Key held_{};
};

// Names for KeptInputs::wanted: `count` of them, from the returned one on.
uint64_t new_input_names(uint64_t count);

struct MatmulKernels {
  // `kept` may be null.
  void (*gemv)(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
               const float* const* x, int num_rows, float* const* y, void* scratch,
               KeptInputs* kept);
  void (*gemm)(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
               const float* const* x, int64_t num_rows, float* const* y, void* scratch);
  void (*gemv_transposed)(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                          const float* const* x, int64_t num_rows, float* const* y, void* scratch);
};

extern const MatmulKernels kMatmulRef;
extern const MatmulKernels kMatmulAvx2;
extern const MatmulKernels kMatmulAvx512;
extern const MatmulKernels kMatmulAvx512bf16;
extern const MatmulKernels kMatmulAmx;

}  // namespace moechat
