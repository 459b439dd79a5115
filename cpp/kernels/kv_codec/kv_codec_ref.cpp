#include <cstring>

#include "common/number_formats.h"
#include "kernels/kv_codec/kv_codec.h"

namespace moechat {
namespace kv_codec_ref {
#include "kernels/kv_codec/kv_codec.inl"
}  // namespace kv_codec_ref

const KVCodecKernels kKVCodecRef = {kv_codec_ref::encode, kv_codec_ref::decode, kv_codec_ref::add};

}  // namespace moechat
