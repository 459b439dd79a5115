// What the float32 skeletons share. Every *.inl is included inside the namespace of one instruction
// set, after its lanes_<isa>.h: no inline function compiled for one set can be linked into another.

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

// kLanes scales as float32, exactly.
[[gnu::always_inline]] inline Lanes load_scales(ScaleType type, const uint8_t* p) {
  switch (type) {
    case ScaleType::kF32: return from_bits(load_words(p));
    case ScaleType::kBF16: return from_bits(load_halves(p) << 16);
    case ScaleType::kF16: return load_f16(p);
    case ScaleType::kE8M0: break;
  }
  const Ints code = load_bytes(p);
  Ints bits = code << 23;
  bits = code == 0u ? Ints{} + 0x00400000u : bits;  // 2^-127 is denormal
  return from_bits(code == 255u ? Ints{} + 0x7fc00000u : bits);
}

// dst = n scales times `gain`; dst has room for whole lanes.
[[gnu::always_inline]] inline void convert_scales(ScaleType type, const uint8_t* p, int64_t n,
                                                  float gain, float* dst) {
  const Lanes factor = broadcast(gain);
  const int64_t item = scale_bytes(type);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(dst + i, mul(load_scales(type, p + i * item), factor));
  if (i == n) return;
  alignas(64) uint8_t bytes[4 * kLanes] = {};
  std::memcpy(bytes, p + i * item, static_cast<size_t>((n - i) * item));
  store(dst + i, mul(load_scales(type, bytes), factor));
}
