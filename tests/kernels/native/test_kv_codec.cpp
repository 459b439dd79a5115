// The KV codec reads and writes within its buffers, whatever the width (the sanitizer looks), and
// all instruction sets agree.
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"

namespace {

using namespace moechat;

template <typename Element>
void round_trip(int64_t width, KVCode second, int64_t num_centred) {
  const std::vector<KVPart> parts = {{0, width, KVCode::kInt4}, {width, width, second}};
  const int64_t scales_count = 1 + (parts[1].has_scale() ? 1 : 0);
  const bool bf16 = sizeof(Element) == 2;
  std::minstd_rand random(static_cast<unsigned>(width));
  std::vector<Element> row(static_cast<size_t>(2 * width));
  for (Element& element : row)
    element = static_cast<Element>(bf16 ? 0x3f00 + random() % 256 : random() % 100);
  const std::vector<float> centre(static_cast<size_t>(num_centred), 0.25f);
  const KVRowCode code = {parts.data(), 2, bf16, centre.data(), num_centred};
  std::vector<uint8_t> first_payload;
  std::vector<Element> first_back;
  for (const std::string& name : supported_instruction_sets()) {
    force_instruction_set(name);
    const KVCodecKernels& kernels = *active_instruction_set().kv_codec;
    std::vector<float> scratch(static_cast<size_t>(width)), sums(row.size());
    std::vector<uint8_t> payload(
        static_cast<size_t>(parts[0].payload_bytes() + parts[1].payload_bytes()));
    std::vector<uint16_t> scales(static_cast<size_t>(scales_count));
    std::vector<Element> back(row.size());
    CHECK(kernels.encode(code, row.data(), scratch.data(), payload.data(), scales.data()));
    CHECK(kernels.decode(code, payload.data(), scales.data(), back.data()));
    kernels.add(row.data(), bf16, 2 * width, sums.data());
    if (first_payload.empty()) {
      first_payload = payload;
      first_back = back;
    }
    CHECK(payload == first_payload);
    CHECK(back == first_back);
  }
}

}  // namespace

void test_kv_codec() {
  const std::string before = active_instruction_set().name;
  for (int64_t width = 1; width <= 140; ++width)
    for (const KVCode second : {KVCode::kF16, KVCode::kInt8, KVCode::kInt4})
      for (const int64_t num_centred : {int64_t{0}, width, 2 * width}) {
        round_trip<uint16_t>(width, second, num_centred);
        round_trip<float>(width, second, num_centred);
      }
  force_instruction_set(before);
}
