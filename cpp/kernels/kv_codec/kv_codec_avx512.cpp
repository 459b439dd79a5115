#include <immintrin.h>

#include <cstring>

#include "common/number_formats.h"
#include "kernels/kv_codec/kv_codec.h"

namespace moechat {
namespace kv_codec_avx512 {
#include "kernels/kv_codec/kv_codec.inl"
}  // namespace kv_codec_avx512

const KVCodecKernels kKVCodecAvx512 = {kv_codec_avx512::encode, kv_codec_avx512::decode,
                                      kv_codec_avx512::add};

}  // namespace moechat
