// GGUF blocks of 256 as tiles: one block a chunk.
//
// kQ4_K and kQ5_K: codes, a scale every 32 columns, and less a minimum every 32 columns. The minima
// are a ninth tile: their 6-bit codes times the sums of x over 32 columns, which stand there as
// three BF16 numbers each (tile_inputs.inl), scaled by -dmin.
//
// kQ6_K: code times sub-block scale has at most 14 bits: the sum of two BF16 numbers. The block's
// own scale is then the only one.

// 32 bytes as words.
[[gnu::always_inline]] inline __m512i byte_words(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

template <Format kFormat>
struct TilesWithMinima : PlainTiles {
  static constexpr int64_t kBytes = unit_of(kFormat).bytes;
  static Cut cut(const MatrixView&) { return {9, kUnit, kTileCols, true}; }
  [[gnu::always_inline]] static const uint8_t* block(const Row& row, const Chunk& chunk) {
    return row.data + chunk.segments[0].col / 256 * kBytes;
  }

  const __m512i table = _mm512_load_si512(kFrom0.value);
  [[gnu::always_inline]] void decode(const Row& row, const Chunk& chunk, uint16_t* dst) const {
    const uint8_t* p = block(row, chunk);
    const __m512i fifths = kFormat == Format::kQ5_K ? byte_words(p + 16) : _mm512_setzero_si512();
    const uint8_t* codes = p + kBytes - 128;
    for (int i = 0; i < 8; ++i) {
      __m512i words = byte_words(codes + i / 2 * 32);
      if (i % 2 == 1) words = _mm512_srli_epi16(words, 4);
      words = _mm512_and_si512(words, _mm512_set1_epi16(15));
      if constexpr (kFormat == Format::kQ5_K)
        words = _mm512_mask_add_epi16(
            words, _mm512_test_epi16_mask(fifths, _mm512_set1_epi16(static_cast<short>(1 << i))),
            words, _mm512_set1_epi16(16));
      _mm512_store_si512(dst + i * kTileSize, _mm512_permutexvar_epi16(words, table));
    }
    const __m128i minima = _mm_cvtsi64_si128(static_cast<long long>(k_codes(p).minima));
    const __m128i minima_bf16 = _mm256_castsi256_si128(_mm512_castsi512_si256(
        words_to_bf16(_mm512_castsi128_si512(_mm_cvtepu8_epi16(minima)))));
    _mm512_store_si512(dst + 8 * kTileSize,
                       _mm512_maskz_broadcast_i32x4(0x0fff, minima_bf16));
  }

  [[gnu::always_inline]] static void scales(const Row& row, const Chunk& chunk, float* dst) {
    const uint8_t* p = block(row, chunk);
    store_eight(k_codes(p).scales, f16_at(p), dst);
    dst[8] = -f16_at(p + 2);
  }
};

struct TilesQ6_K : PlainTiles {
  static constexpr int kParts = 2;
  static constexpr int64_t kBytes = 210;
  static Cut cut(const MatrixView&) { return {8, kUnit, 256, false}; }
  [[gnu::always_inline]] static const uint8_t* block(const Row& row, const Chunk& chunk) {
    return row.data + chunk.segments[0].col / 256 * kBytes;
  }

  [[gnu::always_inline]] static void decode(const Row& row, const Chunk& chunk, uint16_t* dst) {
    const uint8_t* p = block(row, chunk);
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, quarter = i % 4;
      __m512i low = byte_words(p + half * 64 + quarter % 2 * 32);
      if (quarter >= 2) low = _mm512_srli_epi16(low, 4);
      const __m512i high = _mm512_srli_epi16(byte_words(p + 128 + half * 32),
                                             static_cast<unsigned>(quarter * 2));
      low = _mm512_and_si512(low, _mm512_set1_epi16(15));
      const __m512i upper = _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi16(3)), 4);
      const __m512i codes = _mm512_sub_epi16(_mm512_or_si512(low, upper), _mm512_set1_epi16(32));
      const auto scale = [p, i](int j) {
        return _mm512_set1_epi16(static_cast<int8_t>(p[192 + i * 2 + j]));
      };
      const __m512i values = _mm512_mullo_epi16(
          codes, _mm512_mask_mov_epi16(scale(0), 0xffff0000u, scale(1)));
      // Multiples of 64 up to 4096, and the rest from -32 to 31.
      const __m512i large = _mm512_and_si512(_mm512_add_epi16(values, _mm512_set1_epi16(32)),
                                             _mm512_set1_epi16(-64));
      uint16_t* tile = dst + i * kParts * kTileSize;
      _mm512_store_si512(tile, words_to_bf16(large));
      _mm512_store_si512(tile + kTileSize, words_to_bf16(_mm512_sub_epi16(values, large)));
    }
  }

  [[gnu::always_inline]] static void scales(const Row& row, const Chunk& chunk, float* dst) {
    *dst = f16_at(block(row, chunk) + 208);
  }
};
