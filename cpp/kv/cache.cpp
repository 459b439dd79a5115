#include "kv/cache.h"

#include <cstring>

#include "common/number_formats.h"
#include "common/status.h"

namespace moechat {

KVCache::KVCache(const std::vector<int64_t>& windows, int64_t width, Compute compute)
    : width_(width), encoding_(compute == Compute::kExact ? KVEncoding::kF32 : KVEncoding::kBF16) {
  if (windows.empty() || width <= 0 || width > kMaxColumns)
    throw Status("bad-argument", "a KV cache needs at least one layer and a sensible width");
  for (const int64_t window : windows) {
    if (window < 0) throw Status("bad-argument", "a window cannot be negative");
    layers_.emplace_back();
    layers_.back().window = window;
  }
}

int64_t KVCache::slot_bytes() const { return width_ * (encoding_ == KVEncoding::kF32 ? 4 : 2); }

int64_t KVCache::bytes() const {
  int64_t pages = 0;
  for (const Layer& layer : layers_) pages += static_cast<int64_t>(layer.pages.size());
  return pages * kPageSlots * slot_bytes();
}

uint8_t* KVCache::new_slot(Layer& layer, int32_t position) {
  const int64_t index = layer.num_slots % kPageSlots;
  const auto pages = static_cast<int64_t>(layer.pages.size());
  if (layer.num_slots == (layer.first_page + pages) * kPageSlots) {
    KVPage page;
    page.encoding = encoding_;
    page.bytes.reset(new uint8_t[static_cast<size_t>(kPageSlots * slot_bytes())]);
    layer.pages.push_back(std::move(page));
  }
  KVPage& page = layer.pages[static_cast<size_t>(layer.num_slots / kPageSlots - layer.first_page)];
  page.positions[static_cast<size_t>(index)] = position;
  ++layer.num_slots;
  return page.bytes.get() + index * slot_bytes();
}

void KVCache::append_encoded(int64_t layer, const int32_t* positions, const uint8_t* rows,
                             int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(new_slot(layers_[layer], positions[i]), rows + i * slot_bytes(),
                static_cast<size_t>(slot_bytes()));
}

void KVCache::append(int64_t layer, int32_t position, const float* row) {
  Layer& own = layers_[layer];
  encode_slot(encoding_, row, width_, new_slot(own, position));
  if (own.window == 0) return;
  const int64_t oldest = position - own.window - kSlackSlots;
  size_t gone = 0;
  while (gone + 1 < own.pages.size() && own.pages[gone].positions[kPageSlots - 1] <= oldest) ++gone;
  own.pages.erase(own.pages.begin(), own.pages.begin() + static_cast<std::ptrdiff_t>(gone));
  own.first_page += static_cast<int64_t>(gone);
}

// Whether the layer still holds what the window of the token at `position` shows.
bool KVCache::can_rewind(const Layer& layer, int32_t position) const {
  if (layer.first_page == 0 || layer.num_slots == 0) return true;
  return layer.pages[0].positions[0] <= position - layer.window + 1;
}

void KVCache::truncate(int32_t position) {
  for (const Layer& layer : layers_)
    if (!can_rewind(layer, position)) position = 0;
  for (Layer& layer : layers_) {
    const int64_t first = layer.first_page * kPageSlots;
    while (layer.num_slots > first &&
           layer.page_of(layer.num_slots - 1)
                   .positions[static_cast<size_t>((layer.num_slots - 1) % kPageSlots)] >= position)
      --layer.num_slots;
    if (position == 0) layer.first_page = layer.num_slots = 0;
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

MatrixView KVCache::slots_view(int64_t layer, int64_t begin, int64_t count) const {
  MatrixView view;
  view.format = encoding_ == KVEncoding::kF32 ? Format::kF32 : Format::kBF16;
  view.data = slot(layer, begin);
  view.rows = count;
  view.cols = width_;
  view.row_stride_bytes = slot_bytes();
  return view;
}

int32_t KVCache::position(int64_t layer, int64_t slot) const {
  return layers_[layer].page_of(slot).positions[static_cast<size_t>(slot % kPageSlots)];
}

const uint8_t* KVCache::slot(int64_t layer, int64_t slot) const {
  return layers_[layer].page_of(slot).bytes.get() + slot % kPageSlots * slot_bytes();
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
