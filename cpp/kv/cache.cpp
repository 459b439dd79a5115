#include "kv/cache.h"

#include <algorithm>
#include <cstring>

#include "common/number_formats.h"
#include "common/status.h"

namespace moechat {

KVCache::KVCache(const std::vector<int64_t>& windows, int64_t num_segments, int64_t segment_width,
                 Compute compute)
    : num_segments_(num_segments), segment_width_(segment_width),
      encoding_(compute == Compute::kExact ? KVEncoding::kF32 : KVEncoding::kBF16) {
  if (windows.empty() || num_segments <= 0 || num_segments > kMaxColumns || segment_width <= 0 ||
      segment_width > kMaxColumns || num_segments * segment_width > kMaxSlotElements)
    throw Status("bad-argument", "a KV cache needs at least one layer and a sensible width");
  for (const int64_t window : windows) {
    if (window < 0 || window > INT32_MAX)
      throw Status("bad-argument", "a window must lie in 0..2^31 - 1");
    layers_.emplace_back();
    layers_.back().window = window;
  }
}

int64_t KVCache::slot_bytes() const { return width() * (encoding_ == KVEncoding::kF32 ? 4 : 2); }

int64_t KVCache::bytes() const {
  int64_t pages = 0;
  for (const Layer& layer : layers_)
    pages += static_cast<int64_t>(layer.pages.size() + layer.aside.size());
  return pages * kPageSlots * slot_bytes();
}

void KVCache::append_row(Layer& layer, int32_t position, const uint8_t* row) {
  const int64_t index = layer.num_slots % kPageSlots;
  const auto pages = static_cast<int64_t>(layer.pages.size());
  if (layer.num_slots == (layer.first_page + pages) * kPageSlots) {
    KVPage page;
    page.encoding = encoding_;
    page.bytes.reset(new uint8_t[static_cast<size_t>(kPageSlots * slot_bytes())]);
    layer.pages.push_back(std::move(page));
  }
  KVPage& page = layer.pages.back();
  page.positions[static_cast<size_t>(index)] = position;
  ++layer.num_slots;
  layer.end = int64_t{position} + 1;
  const int64_t bytes = segment_bytes();
  for (int64_t s = 0; s < num_segments_; ++s)
    std::memcpy(page.bytes.get() + (s * kPageSlots + index) * bytes, row + s * bytes,
                static_cast<size_t>(bytes));
}

void KVCache::append_encoded(int64_t layer, const int32_t* positions, const uint8_t* rows,
                             int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    append_row(layers_[layer], positions[i], rows + i * slot_bytes());
}

KVPlace KVCache::place(int64_t layer) const {
  const Layer& own = layers_[layer];
  return {own.first_page * kPageSlots, own.begin, own.end};
}

KVPlace KVCache::aside_place(int64_t layer) const {
  const Layer& own = layers_[layer];
  return {own.aside_first_page * kPageSlots, own.aside_begin, own.aside_end};
}

void KVCache::restore(int64_t layer, const KVPlace& place, const int32_t* positions,
                      const uint8_t* rows, int64_t count) {
  Layer& own = layers_[layer];
  own.first_page = place.first_slot / kPageSlots;
  own.num_slots = place.first_slot;
  append_encoded(layer, positions, rows, count);
  own.begin = place.begin;
  own.end = place.end;
}

void KVCache::restore_aside(int64_t layer, const KVPlace& place, const int32_t* positions,
                            const uint8_t* rows, int64_t count) {
  Layer kept;
  kept.first_page = place.first_slot / kPageSlots;
  kept.num_slots = place.first_slot;
  for (int64_t i = 0; i < count; ++i) append_row(kept, positions[i], rows + i * slot_bytes());
  Layer& own = layers_[layer];
  own.aside = std::move(kept.pages);
  own.aside_first_page = kept.first_page;
  own.aside_begin = place.begin;
  own.aside_end = place.end;
}

void KVCache::append(int64_t layer, int32_t position, const float* row) {
  Layer& own = layers_[layer];
  encoded_.resize(static_cast<size_t>(slot_bytes()));
  encode_slot(encoding_, row, width(), encoded_.data());
  append_row(own, position, encoded_.data());
  free_left(own, position);
}

void KVCache::free_left(Layer& layer, int32_t position) {
  if (layer.window == 0) return;
  const int64_t oldest = position - layer.window - kSlackSlots;
  size_t gone = 0;
  while (gone + 1 < layer.pages.size() && layer.pages[gone].positions[kPageSlots - 1] <= oldest) {
    const int64_t last = layer.pages[gone].positions[kPageSlots - 1];
    put_aside(layer, gone++);
    layer.begin = last + 1;
  }
  layer.pages.erase(layer.pages.begin(), layer.pages.begin() + static_cast<std::ptrdiff_t>(gone));
  layer.first_page += static_cast<int64_t>(gone);
}

// A page that is about to be freed is kept when it holds slots that the token at the mark, or one
// shortly before it, sees.
void KVCache::put_aside(Layer& layer, size_t page) {
  const auto& positions = layer.pages[page].positions;
  const int64_t number = layer.first_page + static_cast<int64_t>(page);
  if (positions[kPageSlots - 1] <= mark_ - layer.window - kPageSlots || positions[0] > mark_) return;
  const auto aside = static_cast<int64_t>(layer.aside.size());
  if (layer.aside_first_page + aside != number) layer.aside.clear();  // of an earlier mark
  if (layer.aside.empty()) {
    layer.aside_first_page = number;
    layer.aside_begin = layer.begin;
  }
  layer.aside_end = layer.pages[page + 1].positions[0];
  layer.aside.push_back(std::move(layer.pages[page]));
}

void KVCache::settle() {
  for (Layer& layer : layers_)
    if (layer.num_slots > layer.first_page * kPageSlots)
      free_left(layer, layer.pages.back().positions[static_cast<size_t>(
                           (layer.num_slots - 1) % kPageSlots)]);
}

// Whether the layer still holds what the window of the token at `position` shows.
bool KVCache::can_rewind(const Layer& layer, int32_t position) const {
  return layer.begin <= std::max<int64_t>(0, position - layer.window + 1);
}

bool KVCache::can_restore(const Layer& layer, int32_t position) const {
  return !layer.aside.empty() &&
         layer.aside_begin <= std::max<int64_t>(0, position - layer.window + 1) &&
         layer.aside_end >= position;
}

void KVCache::truncate(int32_t position) {
  for (const Layer& layer : layers_)
    if (!can_rewind(layer, position) && !can_restore(layer, position)) position = 0;
  for (Layer& layer : layers_) {
    if (position > 0 && !can_rewind(layer, position)) {
      layer.pages = std::move(layer.aside);
      layer.first_page = layer.aside_first_page;
      layer.begin = layer.aside_begin;
      layer.num_slots =
          (layer.first_page + static_cast<int64_t>(layer.pages.size())) * kPageSlots;
    }
    if (position <= mark_) layer.aside.clear();
    const int64_t first = layer.first_page * kPageSlots;
    while (layer.num_slots > first &&
           layer.page_of(layer.num_slots - 1)
                   .positions[static_cast<size_t>((layer.num_slots - 1) % kPageSlots)] >= position)
      --layer.num_slots;
    if (position == 0) layer.first_page = layer.num_slots = layer.begin = 0;
    layer.end = std::min<int64_t>(layer.end, position);
    const int64_t pages = (layer.num_slots + kPageSlots - 1) / kPageSlots - layer.first_page;
    layer.pages.resize(static_cast<size_t>(pages));
  }
}

int64_t KVCache::first_visible(int64_t layer, int64_t position) const {
  const Layer& own = layers_[layer];
  int64_t low = own.first_page * kPageSlots, high = own.num_slots;
  if (own.window == 0) return low;
  while (low < high) {  // positions rise with the slots
    const int64_t middle = low + (high - low) / 2;
    if (this->position(layer, middle) > position - own.window)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

MatrixView KVCache::segment_view(int64_t layer, int64_t segment, int64_t begin,
                                 int64_t count) const {
  MatrixView view;
  view.format = encoding_ == KVEncoding::kF32 ? Format::kF32 : Format::kBF16;
  view.data = layers_[layer].page_of(begin).bytes.get() +
              (segment * kPageSlots + begin % kPageSlots) * segment_bytes();
  view.rows = count;
  view.cols = segment_width_;
  view.row_stride_bytes = segment_bytes();
  return view;
}

int32_t KVCache::position(int64_t layer, int64_t slot) const {
  return layers_[layer].page_of(slot).positions[static_cast<size_t>(slot % kPageSlots)];
}

void KVCache::read(int64_t layer, int64_t slot, uint8_t* row) const {
  const uint8_t* page = layers_[layer].page_of(slot).bytes.get();
  const int64_t bytes = segment_bytes();
  for (int64_t s = 0; s < num_segments_; ++s)
    std::memcpy(row + s * bytes, page + (s * kPageSlots + slot % kPageSlots) * bytes,
                static_cast<size_t>(bytes));
}

void KVCache::decode(int64_t layer, int64_t slot, float* values) const {
  const uint8_t* page = layers_[layer].page_of(slot).bytes.get();
  for (int64_t s = 0; s < num_segments_; ++s)
    decode_slot(encoding_, page + (s * kPageSlots + slot % kPageSlots) * segment_bytes(),
                segment_width_, values + s * segment_width_);
}

void encode_slot(KVEncoding encoding, const float* src, int64_t width, uint8_t* slot) {
  if (encoding == KVEncoding::kF32) {
    std::memcpy(slot, src, static_cast<size_t>(width) * 4);
    return;
  }
  for (int64_t i = 0; i < width; ++i) {
    const uint16_t bits = f32_to_bf16(src[i]);
    std::memcpy(slot + 2 * i, &bits, 2);
  }
}

void decode_slot(KVEncoding encoding, const uint8_t* slot, int64_t width, float* dst) {
  if (encoding == KVEncoding::kF32) {
    std::memcpy(dst, slot, static_cast<size_t>(width) * 4);
    return;
  }
  for (int64_t i = 0; i < width; ++i) dst[i] = bf16_to_f32(load_u16(slot + 2 * i));
}

}  // namespace moechat
