// AVX-512 with BF16 and VBMI: gemv straight from FP8 and BF16 bytes with vdpbf16ps. FP8 codes are
// looked up, high and low byte of their BF16 value apart (two vpermi2b on a 128-entry table: exact,
// subnormals and NaN included; the sign bit does not take part in the look-up).
//
// vdpbf16ps flushes denormal inputs and results; FP8 values times BF16 activations stay far above.
#include <immintrin.h>

#include "common/number_formats.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace matmul_avx512bf16 {

constexpr int64_t kGroup = 128;               // columns between two uses of a scale
constexpr int64_t kBlock = 64;                // columns decoded together
constexpr int64_t kVectors = kGroup / 32;     // registers of 32 BF16 a group
constexpr int kRowsTogether = 4;

struct ByteTables {
  alignas(64) uint8_t high[128], low[128];
};

constexpr ByteTables make_tables() {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    int bits = 0;
    if (code == 127) {
      bits = 0x7fc0;
    } else if (exponent > 0) {
      bits = (exponent + 120) << 7 | mantissa << 4;
    } else if (mantissa > 0) {  // mantissa * 2^-9, normalised
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = (127 - 9 + top) << 7 | ((mantissa << (7 - top)) & 0x7f);
    }
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
    tables.low[code] = static_cast<uint8_t>(bits & 0xff);
  }
  return tables;
}
constexpr ByteTables kTables = make_tables();

[[gnu::always_inline]] inline __mmask64 first64(int64_t n) {
  return n >= 64 ? ~0ull : (1ull << n) - 1;
}

// 64 weights as two registers of BF16. FP8: `even` holds the 8-element pieces 0, 2, 4, 6 of the
// block, `odd` the pieces 1, 3, 5, 7 (byte unpacking works within 128-bit lanes); the activations
// are laid out alike. Only the first n weights are read, zeros stand for the others.
struct DecoderFP8 {
  static constexpr Format kFormat = Format::kFP8Block;
  __m512i high0 = _mm512_load_si512(kTables.high), high1 = _mm512_load_si512(kTables.high + 64);
  __m512i low0 = _mm512_load_si512(kTables.low), low1 = _mm512_load_si512(kTables.low + 64);
  __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));

  [[gnu::always_inline]] void operator()(const uint8_t* p, int64_t n, __m512i* out) const {
    const __m512i codes =
        n >= kBlock ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(first64(n), p);
    __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
};

struct DecoderBF16 {
  static constexpr Format kFormat = Format::kBF16;
  [[gnu::always_inline]] void operator()(const uint8_t* p, int64_t n, __m512i* out) const {
    if (n >= kBlock) {
      out[0] = _mm512_loadu_si512(p);
      out[1] = _mm512_loadu_si512(p + 64);
      return;
    }
    const __mmask64 mask = first64(n);
    out[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), p);
    out[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), p + 64);
  }
};

[[gnu::always_inline]] inline int64_t group_end(const MatrixView& w, int64_t k) {
  int64_t end = k + kGroup < w.cols ? k + kGroup : w.cols;
  if (w.format == Format::kFP8Block) {
    const int64_t edge = k + w.block_cols - (k + w.col_origin) % w.block_cols;
    end = edge < end ? edge : end;
  }
  return end;
}

// One activation row as BF16, group by group, each group padded with zeros to kGroup and laid out
// as the decoder needs it. Returns the number of groups.
int64_t prepare(const MatrixView& w, const float* x, uint16_t* out) {
  int64_t groups = 0;
  for (int64_t k = 0; k < w.cols; ++groups) {
    const int64_t end = group_end(w, k);
    for (int64_t piece = 0; piece < kGroup / 16; ++piece) {
      const int64_t left = end - k - piece * 16;
      const __m512 v =
          left >= 16 ? _mm512_loadu_ps(x + k + piece * 16)
          : left > 0 ? _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), x + k + piece * 16)
                     : _mm512_setzero_ps();
      const __m256i bits = (__m256i)_mm512_cvtneps_pbh(v);
      uint16_t* block = out + groups * kGroup + piece / 4 * kBlock;
      if (w.format == Format::kFP8Block) {
        uint16_t* even = block + piece % 4 * 8;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(even), _mm256_castsi256_si128(bits));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(even + 32), _mm256_extracti128_si256(bits, 1));
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + piece % 4 * 16), bits);
      }
    }
    k = end;
  }
  return groups;
}

// Per (weight row, activation row): four vdpbf16ps a group into a fresh register, times the scale
// into the total; the same whatever kRows and num_rows are.
template <typename Decoder, int kRows>
[[gnu::always_inline]] inline void gemv_rows(const Decoder& decoder, const MatrixView& w,
                                             int64_t row, const uint16_t* x, int64_t x_stride,
                                             int num_rows, float* const* y) {
  constexpr int64_t kElement = Decoder::kFormat == Format::kFP8Block ? 1 : 2;
  const uint8_t* base = w.data + row * w.row_stride_bytes;
  __m512 total[kMaxGemvRows][kRows];
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_setzero_ps();
  int64_t group = 0;
  for (int64_t k = 0; k < w.cols; ++group) {
    const int64_t end = group_end(w, k), count = end - k;
    const bool wide = count > kBlock;
    __m512i weight[kRows][kVectors];
    __m512 scale[kRows];
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* p = base + i * w.row_stride_bytes + k * kElement;
      decoder(p, count, weight[i]);
      if (wide) decoder(p + kBlock * kElement, count - kBlock, weight[i] + 2);
      scale[i] = _mm512_set1_ps(Decoder::kFormat == Format::kFP8Block
                                    ? load_f32(w.scale_at(row + i, k)) : 1.0f);
    }
    for (int r = 0; r < num_rows; ++r) {
      const uint16_t* input = x + r * x_stride + group * kGroup;
      __m512 acc[kRows];
      for (int i = 0; i < kRows; ++i) acc[i] = _mm512_setzero_ps();
      for (int v = 0; v < (wide ? kVectors : 2); ++v) {
        const __m512bh inputs = (__m512bh)_mm512_loadu_si512(input + v * 32);
        for (int i = 0; i < kRows; ++i)
          acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)weight[i][v], inputs);
      }
      for (int i = 0; i < kRows; ++i) total[r][i] = _mm512_fmadd_ps(acc[i], scale[i], total[r][i]);
    }
    k = end;
  }
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < kRows; ++i) y[r][row + i] = _mm512_reduce_add_ps(total[r][i]);
}

template <typename Decoder>
void gemv_format(const MatrixView& w, int64_t row_begin, int64_t row_end, const float* const* x,
                 int num_rows, float* const* y, uint16_t* inputs) {
  int64_t groups = 0;
  for (int64_t k = 0; k < w.cols; ++groups) k = group_end(w, k);
  const int64_t stride = groups * kGroup;
  for (int r = 0; r < num_rows; ++r) prepare(w, x[r], inputs + r * stride);
  const Decoder decoder;
  int64_t row = row_begin;
  for (; row + kRowsTogether <= row_end; row += kRowsTogether)
    gemv_rows<Decoder, kRowsTogether>(decoder, w, row, inputs, stride, num_rows, y);
  for (; row < row_end; ++row)
    gemv_rows<Decoder, 1>(decoder, w, row, inputs, stride, num_rows, y);
}

void gemv(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int num_rows, float* const* y, void* scratch) {
  auto* inputs = static_cast<uint16_t*>(scratch);
  // Blocks narrower than a group would need more padding than the scratch has.
  const bool narrow = w.format == Format::kFP8Block && w.block_cols < kGroup;
  if (compute == Compute::kExact || w.format == Format::kF32 || narrow)
    kMatmulAvx512.gemv(w, row_begin, row_end, compute, x, num_rows, y, scratch);
  else if (w.format == Format::kFP8Block)
    gemv_format<DecoderFP8>(w, row_begin, row_end, x, num_rows, y, inputs);
  else
    gemv_format<DecoderBF16>(w, row_begin, row_end, x, num_rows, y, inputs);
}

void gemm(const MatrixView& w, int64_t row_begin, int64_t row_end, Compute compute,
          const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  kMatmulAvx512.gemm(w, row_begin, row_end, compute, x, num_rows, y, scratch);
}

void gemv_transposed(const MatrixView& w, int64_t col_begin, int64_t col_end, Compute compute,
                     const float* const* x, int64_t num_rows, float* const* y, void* scratch) {
  kMatmulAvx512.gemv_transposed(w, col_begin, col_end, compute, x, num_rows, y, scratch);
}

}  // namespace matmul_avx512bf16

const MatmulKernels kMatmulAvx512bf16 = {matmul_avx512bf16::gemv, matmul_avx512bf16::gemm,
                                         matmul_avx512bf16::gemv_transposed};

}  // namespace moechat
