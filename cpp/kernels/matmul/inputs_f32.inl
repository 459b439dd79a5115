// What the float32 skeletons share. Every *_f32.inl is included inside the namespace of one
// instruction set, after its lanes_<isa>.h, this one first: no inline function compiled for one set
// can be linked into another.
//
// FP8 decoders return 2^-8 of the value; kGain puts it back, folded into the block scale.

template <Format kFormat>
constexpr float kGain = kFormat == Format::kFP8 ? 256.0f : 1.0f;

// The scale in column `scale_col` of a row of the grid, times kGain; 1 for formats without scales.
template <Format kFormat>
[[gnu::always_inline]] inline float gain(const uint8_t* scale_row, int64_t scale_col) {
  if constexpr (kFormat == Format::kFP8)
    return load_f32(scale_row + 4 * scale_col) * kGain<kFormat>;
  return 1.0f;
}

// dst = src, rounded to BF16 when asked.
[[gnu::always_inline]] inline void copy_inputs(const float* src, int64_t n, Compute compute,
                                               float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes v = load(src + i);
    store(dst + i, compute == Compute::kBF16 ? round_bf16(v) : v);
  }
  if (i == n) return;
  const Lanes v = load(src + i, n - i);
  store(dst + i, compute == Compute::kBF16 ? round_bf16(v) : v, n - i);
}

// Formats that have decoders here; the others take the reference kernels.
[[gnu::always_inline]] inline bool vectorised(const MatrixView& w) {
  if (w.col_step != 1) return false;
  return w.format == Format::kF32 || w.format == Format::kBF16 ||
         (w.format == Format::kFP8 && w.scale_type == ScaleType::kF32);
}
