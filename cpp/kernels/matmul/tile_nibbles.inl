// 4-bit weights as tiles: vpmultishiftqb puts 32 nibbles at the bottom of 32 words, vpermw looks
// their values up. It takes five bits of a word, so a table of 16 values stands there twice and the
// bit above a nibble does not matter.

// Where the columns of 16 bytes stand: the quadword of each output quadword, and the bit of each of
// its words.
struct NibbleOrder {
  alignas(64) uint64_t quad[8] = {};
  alignas(64) uint8_t bit[64] = {};
};
template <typename Nibble>
constexpr NibbleOrder make_nibble_order(Nibble nibble_of) {
  NibbleOrder order;
  for (int column = 0; column < 32; ++column) {
    const int nibble = nibble_of(column);
    order.quad[column / 4] = static_cast<uint64_t>(nibble / 16);
    order.bit[column * 2] = static_cast<uint8_t>(nibble % 16 * 4);
  }
  return order;
}
constexpr int low_first(int column) { return column; }
constexpr int low_half_first(int column) { return column % 16 * 2 + column / 16; }
constexpr NibbleOrder kLowFirst = make_nibble_order(low_first);
constexpr NibbleOrder kLowHalfFirst = make_nibble_order(low_half_first);

[[gnu::always_inline]] inline __m512i nibble_words(__m128i bytes, const NibbleOrder& order) {
  const __m512i quads = _mm512_permutexvar_epi64(_mm512_load_si512(order.quad),
                                                 _mm512_castsi128_si512(bytes));
  return _mm512_multishift_epi64_epi8(_mm512_load_si512(order.bit), quads);
}

// 16 bytes, of which the first (n + 1) / 2 are there.
[[gnu::always_inline]] inline __m128i load_nibbles(const uint8_t* p, int64_t n) {
  return _mm_maskz_loadu_epi8(first((n + 1) / 2), p);
}

// Rows of nibbles, low first; scales in a grid.
template <const uint16_t* kTable>
struct TilesNibbles : PlainTiles, GridScales {
  static Cut cut(const MatrixView& w) { return {8, kUnit, w.block_cols, false}; }
  const __m512i table = load_table(kTable);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t n) {
      const __m512i words = nibble_words(load_nibbles(row.data + col / 2, n), kLowFirst);
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(words, table));
    });
  }
};

// kMXFP4 whose scales are powers of two in BF16's range (scales_fit): a scale is added to the
// exponents of the table, and nothing remains to be done with the sums.
struct TilesScaledMXFP4 : PlainTiles, NoScales {
  static Cut cut(const MatrixView&) { return {8, kUnit, 0, false}; }
  const __m512i table = load_table(kE2M1Values);
  const __mmask32 nonzero = 0xfefefefe;
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t n) {
      const __m512i words = nibble_words(load_nibbles(row.data + col / 2, n), kLowFirst);
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
  const __m512i table = load_table(kTable);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t) {
      const uint8_t* codes = this->block(row, col) + kBytes - 16;
      const __m512i words = nibble_words(load_nibbles(codes, 32), kLowHalfFirst);
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(words, table));
    });
  }
};

struct Words32 {
  alignas(64) uint16_t value[32];
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
  const __m512i table = _mm512_load_si512(kFromMinus16.value);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    for_tiles(chunk, [&](int tile, int64_t col, int64_t) {
      const uint8_t* p = block(row, col);
      const __m512i words = nibble_words(load_nibbles(p + 6, 32), kLowHalfFirst);
      const __m512i low = _mm512_and_si512(words, _mm512_set1_epi16(15));
      const __m512i codes = _mm512_mask_add_epi16(low, load_u32(p + 2), low, _mm512_set1_epi16(16));
      _mm512_store_si512(dst + tile * kTileSize, _mm512_permutexvar_epi16(codes, table));
    });
  }
};
