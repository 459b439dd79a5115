// One session's KV cache: pages of slots, one list of pages a layer, in the compute type.
//
// A slot has one or more segments of equal width: the latent and its rotary key in one, or the keys
// and values of each head apart. A page holds segment after segment, so that attention of one head
// reads its keys, and its values, in one piece.
//
// A layer with a sliding window keeps its window and kSlackSlots more; older pages are freed while
// decode steps. Slots keep their numbers: the first one held then is first_slot(layer). What was in
// the window at the mark, where an answer began, is kept aside: many templates drop an answer's
// thinking from the next prompt, which then goes on from there.
//
// Slots carry explicit positions, which rise. A policy may drop tokens on their way here: their
// slots are absent, so layers may hold different numbers of slots, and slot and position differ.
// A layer is complete up to its end_position: each position below it has a slot, was dropped, or
// has left the window.
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
constexpr int64_t kMaxSlotElements = int64_t{1} << 20;

// How a page's elements are stored. Both encodings are the compute types, bit for bit.
enum class KVEncoding : uint8_t { kBF16, kF32 };

// kPageSlots slots, segment by segment.
struct KVPage {
  KVEncoding encoding{};
  std::unique_ptr<uint8_t[]> bytes;
  std::array<int32_t, kPageSlots> positions{};
};

// Where a run of slots stands, for a copy of it: the number of the first, a multiple of kPageSlots,
// and the positions [begin, end) for which it is complete.
struct KVPlace {
  int64_t first_slot = 0, begin = 0, end = 0;
};

class KVCache {
 public:
  // One layer for each window; a window of 0 keeps everything. Throws Status "bad-argument" on
  // sizes that make no sense.
  KVCache(const std::vector<int64_t>& windows, int64_t num_segments, int64_t segment_width,
          Compute compute);

  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t num_segments() const { return num_segments_; }
  int64_t width() const { return num_segments_ * segment_width_; }  // elements of a slot
  KVEncoding encoding() const { return encoding_; }
  int64_t slot_bytes() const;
  // Slots are numbered [first_slot, num_slots); first_slot is 0 without a window.
  int64_t first_slot(int64_t layer) const { return layers_[layer].first_page * kPageSlots; }
  int64_t num_slots(int64_t layer) const { return layers_[layer].num_slots; }
  int64_t window(int64_t layer) const { return layers_[layer].window; }
  // The position that is next to be appended, after a truncation at the latest the one given there.
  int64_t end_position(int64_t layer) const { return layers_[layer].end; }
  // Slots of lower positions have left the window.
  int64_t begin_position(int64_t layer) const { return layers_[layer].begin; }
  // Slots kept aside for a rewind to the mark; none: a count of 0. read() and position() take their
  // numbers, too, which are below first_slot.
  int64_t num_aside_slots(int64_t layer) const {
    return static_cast<int64_t>(layers_[layer].aside.size()) * kPageSlots;
  }
  KVPlace place(int64_t layer) const;
  KVPlace aside_place(int64_t layer) const;
  int64_t bytes() const;  // of all pages

  // Appends `count` slots in this cache's encoding (rows of slot_bytes()). Frees nothing, so that a
  // prefill that is cut can be taken back.
  void append_encoded(int64_t layer, const int32_t* positions, const uint8_t* rows, int64_t count);
  // Appends one slot from float32, rounding to the encoding; frees pages that left the window.
  void append(int64_t layer, int32_t position, const float* row);
  // Fills a layer that holds nothing with the copy of another's, and then what that kept aside: whole
  // pages of slots below the others. Slots as for append_encoded.
  void restore(int64_t layer, const KVPlace& place, const int32_t* positions, const uint8_t* rows,
               int64_t count);
  void restore_aside(int64_t layer, const KVPlace& place, const int32_t* positions,
                     const uint8_t* rows, int64_t count);
  // Frees pages that left the windows: for when a prefill is complete and its slots stay.
  void settle();
  // Answers begin at `position` from now on.
  void mark(int32_t position) { mark_ = position; }
  // Keeps slots whose position is < `position` in every layer; what a policy dropped of them stays
  // dropped. When a layer has freed what its window would then show, everything is let go: the
  // caller prefills again.
  void truncate(int32_t position);

  // First slot of a layer that a query at `position` sees.
  int64_t first_visible(int64_t layer, int64_t position) const;
  // One segment of the slots [begin, begin + count) of one page, as a [count, segment_width] matrix.
  MatrixView segment_view(int64_t layer, int64_t segment, int64_t begin, int64_t count) const;
  int32_t position(int64_t layer, int64_t slot) const;
  // row = one slot in the cache's encoding, slot_bytes() of it.
  void read(int64_t layer, int64_t slot, uint8_t* row) const;
  // values[width] = one slot as float32.
  void decode(int64_t layer, int64_t slot, float* values) const;

 private:
  struct Layer {
    std::vector<KVPage> pages;
    int64_t window = 0, first_page = 0, num_slots = 0;
    int64_t begin = 0, end = 0;  // positions, see begin_position and end_position
    std::vector<KVPage> aside;  // full pages around the mark that left `pages`, in order
    int64_t aside_first_page = 0;
    int64_t aside_begin = 0, aside_end = 0;  // positions that `aside` answers for
    const KVPage& page_of(int64_t slot) const {
      const int64_t page = slot / kPageSlots;
      return page >= first_page ? pages[static_cast<size_t>(page - first_page)]
                                : aside[static_cast<size_t>(page - aside_first_page)];
    }
  };
  void free_left(Layer& layer, int32_t position);
  void append_row(Layer& layer, int32_t position, const uint8_t* row);
  int64_t segment_bytes() const { return slot_bytes() / num_segments_; }
  bool can_rewind(const Layer& layer, int32_t position) const;
  bool can_restore(const Layer& layer, int32_t position) const;
  void put_aside(Layer& layer, size_t page);

  int64_t num_segments_, segment_width_;
  KVEncoding encoding_;
  std::vector<Layer> layers_;
  int32_t mark_ = 0;
  std::vector<uint8_t> encoded_;  // one slot, of append()
};

// slot = src[width] in the given encoding (BF16: nearest even).
void encode_slot(KVEncoding encoding, const float* src, int64_t width, uint8_t* slot);
// dst[width] = one slot as float32.
void decode_slot(KVEncoding encoding, const uint8_t* slot, int64_t width, float* dst);

}  // namespace moechat
