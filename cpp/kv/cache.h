// One session's KV cache: pages of slots, one list of pages a layer, in the compute type.
//
// Threads: only the decode side writes (append, truncate). A prefill job reads slots before its own
// span of layer l while packets of earlier layers are being appended; lists of different layers are
// independent, and layer l's packet is appended only after the job has read layer l.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/matrix_view.h"
#include "kernels/matmul/matmul.h"

namespace moechat {

constexpr int64_t kPageSlots = 64;

// How a page's elements are stored. Both encodings are the compute types, bit for bit.
enum class KVEncoding : uint8_t { kBF16, kF32 };

// `width` elements a slot. Slots carry explicit positions: slot and position differ once a policy
// drops tokens.
struct KVPage {
  KVEncoding encoding{};
  std::unique_ptr<uint8_t[]> bytes;
  std::array<int32_t, kPageSlots> positions{};
};

class KVCache {
 public:
  // Throws Status "bad-argument" on a non-positive size.
  KVCache(int64_t num_layers, int64_t width, Compute compute);

  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t width() const { return width_; }
  KVEncoding encoding() const { return encoding_; }
  int64_t slot_bytes() const;
  int64_t num_slots(int64_t layer) const { return layers_[layer].num_slots; }
  int64_t bytes() const;  // of all pages

  // Appends `count` slots in this cache's encoding (rows of slot_bytes()).
  void append_encoded(int64_t layer, const int32_t* positions, const uint8_t* rows, int64_t count);
  // Appends one slot from float32, rounding to the encoding.
  void append(int64_t layer, int32_t position, const float* row);
  // Keeps slots whose position is < `position` in every layer; frees whole pages.
  void truncate(int32_t position);

  // Slots [page * kPageSlots, ...) of a layer as a [slots, width] matrix; `count` <= kPageSlots.
  MatrixView page_view(int64_t layer, int64_t page, int64_t count) const;
  int32_t position(int64_t layer, int64_t slot) const;
  // Bytes of one slot.
  const uint8_t* slot(int64_t layer, int64_t slot) const;

 private:
  struct Layer {
    std::vector<KVPage> pages;
    int64_t num_slots = 0;
  };
  uint8_t* new_slot(Layer& layer, int32_t position);

  int64_t width_;
  KVEncoding encoding_;
  std::vector<Layer> layers_;
};

// slot = src[width] in the given encoding (BF16: nearest even).
void encode_slot(KVEncoding encoding, const float* src, int64_t width, uint8_t* slot);
// dst[width] = one slot as float32.
void decode_slot(KVEncoding encoding, const uint8_t* slot, int64_t width, float* dst);

}  // namespace moechat
