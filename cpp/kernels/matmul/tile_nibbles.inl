// 4-bit weights as tiles: 16 bytes stand four times in a register, as words shifted by 0, 4, 8 and 12
// bits; vpermw looks the values up. It takes five bits of a word, so a table of 16 values stands
// there twice and the bit above a nibble does not matter. Activations are put in the same order.

struct Words32 {
  alignas(64) uint16_t value[32];
};
// The column of every word, for the nibble that a column has.
template <typename Nibble>
constexpr Words32 make_nibble_order(Nibble nibble_of) {
  Words32 order{};
  for (int column = 0; column < 32; ++column) {
    const int nibble = nibble_of(column);
    order.value[nibble % 4 * 8 + nibble / 4] = static_cast<uint16_t>(column);
  }
  return order;
}
constexpr int low_first(int column) { return column; }
constexpr int low_half_first(int column) { return column % 16 * 2 + column / 16; }
constexpr Words32 kLowFirst = make_nibble_order(low_first);
constexpr Words32 kLowHalfFirst = make_nibble_order(low_half_first);

[[gnu::always_inline]] inline __m512i put_in_order(__m512i columns, const Words32& order) {
  return _mm512_permutexvar_epi16(_mm512_load_si512(order.value), columns);
}

[[gnu::always_inline]] inline __m512i nibble_words(__m128i bytes) {
  const __m512i bits = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                        0x0008000800080008, 0x0004000400040004, 0x0004000400040004,
                                        0, 0);
  return _mm512_srlv_epi16(_mm512_broadcast_i32x4(bytes), bits);
}

// 16 bytes, of which the first (n + 1) / 2 are there.
[[gnu::always_inline]] inline __m128i load_nibbles(const uint8_t* p, int64_t n) {
  return _mm_maskz_loadu_epi8(first((n + 1) / 2), p);
}

// Rows of nibbles, low first; scales in a grid.
template <const uint16_t* kTable>
struct TilesNibbles : PlainTiles, GridScales {
  static Cut cut(const MatrixView& w) { return {8, kUnit, w.block_cols, false}; }
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) {
    return put_in_order(columns, kLowFirst);
  }
  const __m512i table = load_table(kTable);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t n) {
      const __m512i words = nibble_words(load_nibbles(row.data + col / 2, n));
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(words, table));
    });
  }
};

// kMXFP4 whose scales are powers of two in BF16's range (scales_fit): a scale is added to the
// exponents of the table, and nothing remains to be done with the sums.
struct TilesScaledMXFP4 : PlainTiles, NoScales {
  static Cut cut(const MatrixView&) { return {8, kUnit, 0, false}; }
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) {
    return put_in_order(columns, kLowFirst);
  }
  const __m512i table = load_table(kE2M1Values);
  const __mmask32 nonzero = 0xfefefefe;
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t n) {
      const __m512i words = nibble_words(load_nibbles(row.data + col / 2, n));
      const auto exponent_bits = static_cast<short>((row.scales[col / 32] - 127) * 128);
      const __m512i exponent = _mm512_set1_epi16(exponent_bits);
      const __m512i scaled = _mm512_mask_add_epi16(table, nonzero, table, exponent);
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(words, scaled));
    });
  }
};

// Whether 0.5 and 6 times each scale of the rows are normal BF16 numbers, of groups of 32.
bool scales_fit(const MatrixView& w, int64_t begin, int64_t end) {
  if (w.scale_type != ScaleType::kE8M0 || w.block_cols != 32 || w.col_origin % 32 != 0)
    return false;
  __m512i out = _mm512_setzero_si512();
  const int64_t count = num_scales(w);
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* scales = scale_row(w, row);
    for (int64_t i = 0; i < count; i += 64) {
      const __mmask64 mask = first64(count - i);
      const __m512i codes = _mm512_maskz_loadu_epi8(mask, scales + i);
      const __m512i fits = _mm512_min_epu8(_mm512_max_epu8(codes, _mm512_set1_epi8(2)),
                                           _mm512_set1_epi8(static_cast<char>(252)));
      out = _mm512_or_si512(out, _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(codes, fits)));
    }
  }
  return _mm512_test_epi8_mask(out, out) == 0;
}

// GGUF blocks whose low nibbles are the first half.
template <int64_t kBytes, const uint16_t* kTable>
struct TilesNibbleBlocks : BlockTiles<kBytes> {
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) {
    return put_in_order(columns, kLowHalfFirst);
  }
  const __m512i table = load_table(kTable);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t) {
      const uint8_t* codes = this->block(row, col) + kBytes - 16;
      const __m512i words = nibble_words(load_nibbles(codes, 32));
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(words, table));
    });
  }
};

// offset, offset + 1, ... as BF16; at most 8 bits.
constexpr Words32 make_integers(int offset) {
  Words32 words{};
  for (int i = 0; i < 32; ++i) {
    const int magnitude = i + offset < 0 ? -(i + offset) : i + offset;
    int top = 0;
    while (magnitude >> top > 1) ++top;
    const int bits = magnitude == 0 ? 0 : (127 + top) << 7 | ((magnitude << (7 - top)) & 0x7f);
    words.value[i] = static_cast<uint16_t>(bits | (i + offset < 0 ? 0x8000 : 0));
  }
  return words;
}
constexpr Words32 kFrom0 = make_integers(0), kFromMinus16 = make_integers(-16);

struct TilesQ5_0 : BlockTiles<22> {
  [[gnu::always_inline]] static __m512i arrange(__m512i columns) {
    return put_in_order(columns, kLowHalfFirst);
  }
  const __m512i table = _mm512_load_si512(kFromMinus16.value);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t) {
      const uint8_t* p = block(row, col);
      const __m512i words = nibble_words(load_nibbles(p + 6, 32));
      const __m512i low = _mm512_and_si512(words, _mm512_set1_epi16(15));
      const __mmask32 fifths = _mm512_movepi16_mask(arrange(_mm512_movm_epi16(load_u32(p + 2))));
      const __m512i codes = _mm512_mask_add_epi16(low, fifths, low, _mm512_set1_epi16(16));
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(codes, table));
    });
  }
};
