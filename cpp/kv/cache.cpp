#include "kv/cache.h"

#include <cstring>

#include "common/number_formats.h"
#include "common/status.h"

namespace moechat {

KVCache::KVCache(int64_t num_layers, int64_t width, Compute compute)
    : width_(width), encoding_(compute == Compute::kExact ? KVEncoding::kF32 : KVEncoding::kBF16) {
  if (num_layers <= 0 || width <= 0 || width > kMaxColumns)
    throw Status("bad-argument", "a KV cache needs at least one layer and a sensible width");
  layers_.resize(static_cast<size_t>(num_layers));
}

int64_t KVCache::slot_bytes() const { return width_ * (encoding_ == KVEncoding::kF32 ? 4 : 2); }

int64_t KVCache::bytes() const {
  int64_t pages = 0;
  for (const Layer& layer : layers_) pages += static_cast<int64_t>(layer.pages.size());
  return pages * kPageSlots * slot_bytes();
}

uint8_t* KVCache::new_slot(Layer& layer, int32_t position) {
  const int64_t index = layer.num_slots % kPageSlots;
  if (layer.num_slots == static_cast<int64_t>(layer.pages.size()) * kPageSlots) {
    KVPage page;
    page.encoding = encoding_;
    page.bytes.reset(new uint8_t[static_cast<size_t>(kPageSlots * slot_bytes())]);
    layer.pages.push_back(std::move(page));
  }
  KVPage& page = layer.pages[static_cast<size_t>(layer.num_slots / kPageSlots)];
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
  encode_slot(encoding_, row, width_, new_slot(layers_[layer], position));
}

void KVCache::truncate(int32_t position) {
  for (Layer& layer : layers_) {
    while (layer.num_slots > 0 &&
           layer.pages[static_cast<size_t>((layer.num_slots - 1) / kPageSlots)]
                   .positions[static_cast<size_t>((layer.num_slots - 1) % kPageSlots)] >= position)
      --layer.num_slots;
    layer.pages.resize(static_cast<size_t>((layer.num_slots + kPageSlots - 1) / kPageSlots));
  }
}

MatrixView KVCache::page_view(int64_t layer, int64_t page, int64_t count) const {
  MatrixView view;
  view.format = encoding_ == KVEncoding::kF32 ? Format::kF32 : Format::kBF16;
  view.data = layers_[layer].pages[static_cast<size_t>(page)].bytes.get();
  view.rows = count;
  view.cols = width_;
  view.row_stride_bytes = slot_bytes();
  return view;
}

int32_t KVCache::position(int64_t layer, int64_t slot) const {
  return layers_[layer]
      .pages[static_cast<size_t>(slot / kPageSlots)]
      .positions[static_cast<size_t>(slot % kPageSlots)];
}

const uint8_t* KVCache::slot(int64_t layer, int64_t slot) const {
  return layers_[layer].pages[static_cast<size_t>(slot / kPageSlots)].bytes.get() +
         slot % kPageSlots * slot_bytes();
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
