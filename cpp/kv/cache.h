// One session's KV cache: pages of slots, one list of pages a layer, in the compute type.
//
// A layer with a sliding window keeps its window and kSlackSlots more; older pages are freed while
// decode steps. Slots keep their numbers: the first one held then is first_slot(layer).
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
constexpr int64_t kSlackSlots = 512;  // how far a sliding window can be rewound

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
  // One layer for each window; a window of 0 keeps everything. Throws Status "bad-argument" on
  // sizes that make no sense.
  KVCache(const std::vector<int64_t>& windows, int64_t width, Compute compute);

  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t width() const { return width_; }
  KVEncoding encoding() const { return encoding_; }
  int64_t slot_bytes() const;
  // Slots are numbered [first_slot, num_slots); first_slot is 0 without a window.
  int64_t first_slot(int64_t layer) const { return layers_[layer].first_page * kPageSlots; }
  int64_t num_slots(int64_t layer) const { return layers_[layer].num_slots; }
  int64_t window(int64_t layer) const { return layers_[layer].window; }
  int64_t bytes() const;  // of all pages

  // Appends `count` slots in this cache's encoding (rows of slot_bytes()). Frees nothing, so that a
  // prefill that is cut can be taken back.
  void append_encoded(int64_t layer, const int32_t* positions, const uint8_t* rows, int64_t count);
  // Appends one slot from float32, rounding to the encoding; frees pages that left the window.
  void append(int64_t layer, int32_t position, const float* row);
  // Keeps slots whose position is < `position` in every layer. When a layer has freed what its
  // window would then show, everything is dropped: the caller prefills again.
  void truncate(int32_t position);

  // First slot of a layer that a query at `position` sees.
  int64_t first_visible(int64_t layer, int64_t position) const;
  // Slots [begin, begin + count) of one page of a layer as a [count, width] matrix.
  MatrixView slots_view(int64_t layer, int64_t begin, int64_t count) const;
  int32_t position(int64_t layer, int64_t slot) const;
  // Bytes of one slot.
  const uint8_t* slot(int64_t layer, int64_t slot) const;

 private:
  struct Layer {
    std::vector<KVPage> pages;
    int64_t window = 0, first_page = 0, num_slots = 0;
    const KVPage& page_of(int64_t slot) const {
      return pages[static_cast<size_t>(slot / kPageSlots - first_page)];
    }
  };
  uint8_t* new_slot(Layer& layer, int32_t position);
  bool can_rewind(const Layer& layer, int32_t position) const;

  int64_t width_;
  KVEncoding encoding_;
  std::vector<Layer> layers_;
};

// slot = src[width] in the given encoding (BF16: nearest even).
void encode_slot(KVEncoding encoding, const float* src, int64_t width, uint8_t* slot);
// dst[width] = one slot as float32.
void decode_slot(KVEncoding encoding, const uint8_t* slot, int64_t width, float* dst);

}  // namespace moechat
