// KV rows as the bytes of a packet and back. A row is `parts` one after the other, each with a code of
// its own: one head's key, one head's value, a latent, a rotary key.
//
//   kF16     2 bytes an element, nearest even
//   kInt8    round(v / scale) in [-127, 127], scale = largest magnitude / 127
//   kInt4    round(v / scale) in [-7, 7], two a byte, low first, stored + 8; scale = largest / 7
//
// Scales are float16, one a part and row. A centre [width of the row], or null, is taken off before
// and added after. Every instruction set gives the same bytes and the same floats.
#pragma once
#include <cstdint>

namespace moechat {

enum class KVCode : uint8_t { kF16, kInt8, kInt4 };

struct KVPart {
  int64_t begin = 0, width = 0;  // elements of the row
  KVCode code{};

  int64_t payload_bytes() const {
    return code == KVCode::kF16 ? 2 * width : code == KVCode::kInt8 ? width : (width + 1) / 2;
  }
  bool has_scale() const { return code != KVCode::kF16; }
};

struct KVCodecKernels {
  // False when a value, or a scale, has no finite float16 where one is needed; nothing is then said
  // about the bytes.
  bool (*encode)(const KVPart* parts, int64_t num_parts, const float* row, const float* centre,
                 uint8_t* payload, uint16_t* scales);
  void (*decode)(const KVPart* parts, int64_t num_parts, const uint8_t* payload,
                 const uint16_t* scales, const float* centre, float* row);
};

extern const KVCodecKernels kKVCodecRef;
extern const KVCodecKernels kKVCodecAvx2;
extern const KVCodecKernels kKVCodecAvx512;

}  // namespace moechat
