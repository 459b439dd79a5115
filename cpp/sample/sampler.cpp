#include "sample/sampler.h"

#include <emmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "common/status.h"
#include "cpu/dispatch.h"
#include "sample/philox.h"

namespace moechat {
namespace {

constexpr int64_t kBlock = 256;
// In temperatures below the best token. Blocks beyond kReach are left out: at exp(-40) each, all of
// a vocabulary of 2^17 together would weigh 1e-12 of the best, far below the rounding of one
// float32 weight. Tokens beyond kUnderflow, masked ones (-infinity) above all, weigh exactly 0.
constexpr double kReach = 40.0, kUnderflow = 200.0;
// Where all weights are the same anyway (or all but the best are 0); keeps products finite.
constexpr double kMinTemperature = 1e-30, kMaxTemperature = 1e30;
constexpr uint8_t kSeen = 1, kInAnswer = 2;

void check(bool good, const char* what) {
  if (!good) throw Status("bad-argument", what);
}

// The largest that is a number, -infinity when none is: maxps returns its second operand when the
// first is NaN.
float largest(const float* x, int64_t n) {
  constexpr int kLanes = 16;
  __m128 best[4];
  for (__m128& lane : best) lane = _mm_set1_ps(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int v = 0; v < 4; ++v) best[v] = _mm_max_ps(_mm_loadu_ps(x + i + 4 * v), best[v]);
  for (; i < n; ++i) best[0] = _mm_max_ps(_mm_set1_ps(x[i]), best[0]);
  float lanes[4];
  _mm_storeu_ps(lanes, _mm_max_ps(_mm_max_ps(best[0], best[1]), _mm_max_ps(best[2], best[3])));
  return *std::max_element(lanes, lanes + 4);
}

int64_t num_blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

// The lowest id of the largest logit that is a number; 0 when none is.
int32_t best_id(const float* logits, int64_t vocab) {
  const float* found = std::find(logits, logits + vocab, largest(logits, vocab));
  return found == logits + vocab ? 0 : static_cast<int32_t>(found - logits);
}

// Bits of a distance, which is not negative: the mask clears the sign of -0.
int32_t key_of(float distance) {
  int32_t bits;
  std::memcpy(&bits, &distance, sizeof bits);
  return bits & 0x7fffffff;
}

float distance_of(int32_t key) {
  float distance;
  std::memcpy(&distance, &key, sizeof distance);
  return distance;
}

// Keys of n logits, none above `largest_key`, which NaN gets too (as in maxps, see above).
void find_keys(const float* x, int64_t n, float best, int32_t largest_key, int32_t* keys) {
  const float limit = distance_of(largest_key);
  const __m128 limits = _mm_set1_ps(limit), bests = _mm_set1_ps(best);
  const __m128i magnitude = _mm_set1_epi32(0x7fffffff);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const __m128 distance = _mm_min_ps(_mm_sub_ps(bests, _mm_loadu_ps(x + i)), limits);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(keys + i),
                     _mm_and_si128(_mm_castps_si128(distance), magnitude));
  }
  for (; i < n; ++i) keys[i] = key_of(best - x[i] < limit ? best - x[i] : limit);
}

}  // namespace

Sampler::Sampler(const SamplingParams& params, int64_t vocab)
    : params_(params), vocab_(vocab),
      penalised_(params.repetition_penalty != 1.0 || params.presence_penalty != 0.0),
      kernels_(*active_instruction_set().vector) {
  check(vocab > 0 && vocab <= std::numeric_limits<int32_t>::max(), "vocab must be in [1, 2^31)");
  check(params.temperature >= 0 && std::isfinite(params.temperature), "temperature must be >= 0");
  check(params.top_k >= 0, "top_k must be >= 0");
  check(params.top_p > 0 && params.top_p <= 1, "top_p must be in (0, 1]");
  check(params.min_p >= 0 && params.min_p <= 1, "min_p must be in [0, 1]");
  check(params.repetition_penalty > 0 && std::isfinite(params.repetition_penalty),
        "repetition_penalty must be > 0");
  check(std::isfinite(params.presence_penalty), "presence_penalty must be finite");
  temperature_ = std::clamp(params.temperature, kMinTemperature, kMaxTemperature);
  largest_key_ = key_of(static_cast<float>(kUnderflow * temperature_));
  if (penalised_) {
    seen_.resize(static_cast<size_t>(vocab));
    seen_ids_.reserve(static_cast<size_t>(vocab));
    scores_.resize(static_cast<size_t>(vocab));
  }
}

void Sampler::check_id(int32_t id) const {
  check(id >= 0 && id < vocab_, "token id outside the vocabulary");
}

void Sampler::add_context(const int32_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) check_id(ids[i]);
  if (!penalised_) return;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t& seen = seen_[static_cast<size_t>(ids[i])];
    if (seen == 0) seen_ids_.push_back(ids[i]);
    seen |= kSeen;
  }
}

void Sampler::accept(int32_t id) {
  add_context(&id, 1);
  if (penalised_) seen_[static_cast<size_t>(id)] |= kInAnswer;
}

const float* Sampler::penalise(const float* logits) {
  if (seen_ids_.empty()) return logits;
  std::copy(logits, logits + vocab_, scores_.begin());
  const auto repetition = static_cast<float>(params_.repetition_penalty);
  const auto presence = static_cast<float>(params_.presence_penalty);
  for (const int32_t id : seen_ids_) {
    float& score = scores_[static_cast<size_t>(id)];
    score = score > 0 ? score / repetition : score * repetition;
    if (seen_[static_cast<size_t>(id)] & kInAnswer) score -= presence;
  }
  return scores_.data();
}

int32_t Sampler::sample(const float* logits, uint64_t position) {
  const float* scores = penalise(logits);
  if (params_.temperature == 0 || params_.top_k == 1) return best_id(scores, vocab_);
  if (candidates_.keys.empty()) {
    block_best_.resize(static_cast<size_t>(num_blocks(vocab_)));
    blocks_.resize(block_best_.size());
    candidates_.allocate(vocab_);
    finder_.allocate(vocab_);
  }
  for (int64_t b = 0; b < num_blocks(vocab_); ++b)
    block_best_[static_cast<size_t>(b)] =
        largest(scores + b * kBlock, std::min(kBlock, vocab_ - b * kBlock));
  const float best = largest(block_best_.data(), num_blocks(vocab_));
  if (!std::isfinite(best)) return best_id(scores, vocab_);
  gather_blocks(scores, best);
  if (params_.top_k > 0 && params_.top_k < candidates_.size) {
    std::fill_n(candidates_.weights.begin(), candidates_.size, 1.0f);
    finder_.begin(candidates_, largest_key_);
    keep(finder_.find(static_cast<double>(params_.top_k)));
  }
  weigh();
  return draw(position);
}

// Candidates are whole blocks: those of the k best blocks hold the k best tokens (a token elsewhere
// comes after the best of each of these), and blocks too far from the best token weigh nothing.
void Sampler::gather_blocks(const float* scores, float best) {
  const auto reach = static_cast<float>(kReach * temperature_);
  int64_t count = 0;
  for (int64_t b = 0; b < num_blocks(vocab_); ++b) {
    blocks_[static_cast<size_t>(count)] = static_cast<int32_t>(b);
    count += best - block_best_[static_cast<size_t>(b)] < reach;
  }
  if (params_.top_k > 0 && params_.top_k < count) {
    const auto better = [this](int32_t a, int32_t b) {
      const float best_a = block_best_[static_cast<size_t>(a)];
      const float best_b = block_best_[static_cast<size_t>(b)];
      return best_a != best_b ? best_a > best_b : a < b;
    };
    std::nth_element(blocks_.begin(), blocks_.begin() + params_.top_k, blocks_.begin() + count,
                     better);
    count = params_.top_k;
    std::sort(blocks_.begin(), blocks_.begin() + count);
  }
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = blocks_[static_cast<size_t>(i)] * kBlock;
    const int64_t length = std::min(kBlock, vocab_ - begin);
    find_keys(scores + begin, length, best, largest_key_, candidates_.keys.data() + size);
    std::iota(candidates_.ids.begin() + size, candidates_.ids.begin() + size + length,
              static_cast<int32_t>(begin));
    size += length;
  }
  candidates_.size = size;
}

void Sampler::keep(const Prefix& prefix) {
  Candidates& c = candidates_;
  int64_t kept = 0;
  for (int64_t i = 0; i < c.size; ++i) {
    const int32_t key = c.keys[static_cast<size_t>(i)];
    const int32_t id = c.ids[static_cast<size_t>(i)];
    c.keys[static_cast<size_t>(kept)] = key;
    c.ids[static_cast<size_t>(kept)] = id;
    kept += prefix.contains(key, id);
  }
  c.size = kept;
}

void Sampler::weigh() {
  float* weights = candidates_.weights.data();
  const int32_t* keys = candidates_.keys.data();
  const auto inverse = static_cast<float>(1.0 / temperature_);
  const int64_t size = candidates_.size;
  for (int64_t i = 0; i < size; ++i) weights[i] = -distance_of(keys[i]) * inverse;
  kernels_.exp_sum(weights, 0.0f, size);
}

int32_t Sampler::draw(uint64_t position) {
  finder_.begin(candidates_, largest_key_);
  double mass = finder_.total();
  if (params_.top_p < 1 || params_.min_p > 0) {
    const Prefix top = finder_.find(params_.top_p * mass);
    mass = top.mass;
    const int32_t farthest = key_of(static_cast<float>(-std::log(params_.min_p) * temperature_));
    if (params_.min_p > 0 && farthest < top.key) mass = finder_.up_to(farthest).mass;
  }
  return finder_.find(philox_uniform(params_.seed, position) * mass).id;
}

}  // namespace moechat
