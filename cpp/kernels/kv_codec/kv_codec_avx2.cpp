#include <immintrin.h>

#include <cstring>

#include "common/number_formats.h"
#include "kernels/kv_codec/kv_codec.h"

namespace moechat {
namespace kv_codec_avx2 {
#include "kernels/kv_codec/kv_codec.inl"
}  // namespace kv_codec_avx2

const KVCodecKernels kKVCodecAvx2 = {kv_codec_avx2::encode, kv_codec_avx2::decode,
                                      kv_codec_avx2::add};

}  // namespace moechat
