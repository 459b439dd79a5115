// The sampler under the sanitizers: hostile logits and parameters stay inside every buffer. What it
// draws is checked from Python (tests/unit/sample).
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "sample/sampler.h"

namespace {

using namespace moechat;

std::vector<float> hostile_logits(int64_t vocab, std::mt19937& random) {
  std::normal_distribution<float> normal(0, std::pow(10.0f, static_cast<float>(random() % 12) - 6));
  const auto kind = random() % 6;
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& logit : logits) {
    const auto bits = static_cast<uint32_t>(random());
    switch (kind) {
      case 0: logit = 3; break;
      case 1: logit = normal(random); break;
      case 2: logit = static_cast<float>(bits % 3); break;
      case 3: logit = bits % 4 != 0 ? normal(random) : -INFINITY; break;
      case 4: logit = bits % 9 != 0 ? normal(random) : NAN; break;
      default: std::memcpy(&logit, &bits, sizeof logit);
    }
  }
  return logits;
}

}  // namespace

void test_sampler() {
  std::mt19937 random(3);
  const auto pick = [&random](const std::vector<double>& values) {
    return values[random() % values.size()];
  };
  for (int i = 0; i < 1500; ++i) {
    SamplingParams params;
    params.temperature = pick({0, 1e-300, 1e-30, 0.6, 1, 1e300});
    params.top_k = static_cast<int64_t>(pick({0, 1, 3, 40, 600, 1e9}));
    params.top_p = pick({1e-300, 0.5, 0.95, 1});
    params.min_p = pick({0, 1e-300, 0.1, 1});
    params.repetition_penalty = pick({1, 1e-30, 1.2, 1e30});
    params.presence_penalty = pick({0, 1, -1e38});
    const auto vocab = static_cast<int32_t>(pick({1, 2, 15, 16, 17, 255, 256, 257, 3000}));
    Sampler sampler(params, vocab);
    const int32_t context[] = {0, vocab - 1};
    sampler.add_context(context, 2);
    sampler.accept(vocab / 2);
    const std::vector<float> logits = hostile_logits(vocab, random);
    for (uint64_t position = 0; position < 3; ++position) {
      const int32_t token = sampler.sample(logits.data(), position);
      CHECK(token >= 0 && token < vocab);
    }
  }
}
