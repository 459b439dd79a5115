// KV rows as the bytes of a packet and back. A row is `parts` one after the other, each with a code
// of its own: one head's key, one head's value, a latent, a rotary key.
//
//   kF16     2 bytes an element, nearest even
//   kInt8    round(v / scale) in [-127, 127], scale = largest magnitude / 127
//   kInt4    round(v / scale) in [-8, 7], scale = -(value of the largest magnitude) / 8: may be
//            negative, so that -8 is that value's. Stored + 8; byte i holds element i in its low
//            bits and element i + (width + 1) / 2, or nothing (8), in its high bits
//
// Scales are float16, magnitudes rounded up; one a quantised part and row. An error is half a scale
// at most (and what float32 products round); only what is beyond 7.5 scales of kInt4, on the side
// opposite to the largest, is cut, by one scale at most. Every instruction set gives the same bytes
// and the same values.
//
// Why this 4-bit code: on keys (centred) and values of Qwen2.5-Coder-0.5B, five windows of 1,000
// WikiText tokens all coded, 300 scored, the KL of the logits is 0.044. With scale = largest / 7 it
// is 0.052 (errors 12 % larger); with minimum and step of 16 levels 0.061, although its errors are
// 7 % smaller and it takes 2 bytes a part more. The bundled model does not tell them apart.
#pragma once
#include <cstdint>

namespace moechat {

enum class KVCode : uint8_t { kF16, kInt8, kInt4 };

struct KVPart {
  int64_t begin = 0, width = 0;  // elements of the row
  KVCode code{};

  bool has_scale() const { return code != KVCode::kF16; }
  int64_t payload_bytes() const {
    return code == KVCode::kF16 ? 2 * width : code == KVCode::kInt8 ? width : (width + 1) / 2;
  }
};

// How all rows of one tier are coded.
struct KVRowCode {
  const KVPart* parts = nullptr;
  int64_t num_parts = 0;
  bool bf16 = true;  // elements of a row: BF16, else float32
  // Taken off before coding and added after, in quantised parts that lie below num_centred.
  const float* centre = nullptr;
  int64_t num_centred = 0;
};

struct KVCodecKernels {
  // `scratch` has room for the widest part. False when a value is not finite, or it or its scale is
  // beyond float16; the bytes then mean nothing.
  bool (*encode)(const KVRowCode& code, const void* row, float* scratch, uint8_t* payload,
                 uint16_t* scales);
  // Writes the parts' elements of `row`. False when a scale or a float16 value is not finite.
  bool (*decode)(const KVRowCode& code, const uint8_t* payload, const uint16_t* scales, void* row);
  // sums[width] += row.
  void (*add)(const void* row, bool bf16, int64_t width, float* sums);
};

extern const KVCodecKernels kKVCodecRef;
extern const KVCodecKernels kKVCodecAvx2;
extern const KVCodecKernels kKVCodecAvx512;

}  // namespace moechat
