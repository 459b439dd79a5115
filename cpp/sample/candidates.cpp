#include "sample/candidates.h"

#include <emmintrin.h>

#include <algorithm>
#include <cmath>

namespace moechat {
namespace {

constexpr int kBucketBits = 11;
constexpr int32_t kBuckets = 1 << kBucketBits;
// 64 buckets for each factor of two in distance, over the last 32 of them: fine where flat logits
// lie, however flat they are.
constexpr int kTopShift = 17;
// Neighbours are added to different partial sums: flat logits would wait for one sum otherwise.
constexpr int kPartialSums = 4;
constexpr int64_t kSortAtMost = 256;

}  // namespace

void Candidates::allocate(int64_t capacity) {
  keys.resize(static_cast<size_t>(capacity));
  weights.resize(static_cast<size_t>(capacity));
  ids.resize(static_cast<size_t>(capacity));
}

void PrefixFinder::allocate(int64_t capacity) {
  group_.resize(static_cast<size_t>(capacity));
  top_sums_.resize(kBuckets);
  inner_sums_.resize(kBuckets);
  partial_sums_.resize(kBuckets * kPartialSums);
}

void PrefixFinder::begin(const Candidates& candidates, int32_t largest_key) {
  candidates_ = &candidates;
  constexpr int64_t kSpan = int64_t{kBuckets} << kTopShift;
  top_grid_ = {static_cast<int32_t>(std::max<int64_t>(0, largest_key - (kSpan - 1))), kTopShift};
  sum_buckets(
      candidates.size, [](int64_t i) { return i; },
      [origin = top_grid_.origin](int32_t key) { return std::max(0, key - origin) >> kTopShift; },
      top_sums_);
  total_ = 0;
  for (const double sum : top_sums_) total_ += sum;
}

template <typename PositionOf, typename BucketOf>
void PrefixFinder::sum_buckets(int64_t size, PositionOf position_of, BucketOf bucket_of,
                               std::vector<double>& sums) {
  const int32_t* keys = candidates_->keys.data();
  const float* weights = candidates_->weights.data();
  double* partial = partial_sums_.data();
  std::fill(partial_sums_.begin(), partial_sums_.end(), 0.0);
  const auto add = [=](int64_t i, int lane) {
    const int64_t p = position_of(i);
    partial[bucket_of(keys[p]) * kPartialSums + lane] += weights[p];
  };
  int64_t i = 0;
  for (; i + kPartialSums <= size; i += kPartialSums)
    for (int lane = 0; lane < kPartialSums; ++lane) add(i + lane, lane);
  for (; i < size; ++i) add(i, 0);
  for (size_t b = 0; b < kBuckets; ++b) {
    const double* lanes = partial + b * kPartialSums;
    sums[b] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
}

// The bucket in which the mass reaches the target; else the last one that weighs anything.
PrefixFinder::Bucket PrefixFinder::reach(const std::vector<double>& sums, double before,
                                         double target) {
  Bucket last{0, before};
  for (int32_t b = 0; b < kBuckets; ++b) {
    const double sum = sums[static_cast<size_t>(b)];
    if (!(sum > 0)) continue;
    last = {b, before};
    before += sum;
    if (before >= target) break;
  }
  return last;
}

Prefix PrefixFinder::find(double target) {
  Bucket bucket = reach(top_sums_, 0, target);
  gather(top_grid_, bucket.index);
  while (set_in_any_ != set_in_all_) {
    if (group_size_ <= kSortAtMost) return walk_sorted(bucket.before, target);
    const Grid grid = group_grid();
    sum_buckets(
        group_size_, [group = group_.data()](int64_t i) { return group[i]; },
        [grid](int32_t key) { return (key - grid.origin) >> grid.shift; }, inner_sums_);
    bucket = reach(inner_sums_, bucket.before, target);
    narrow(grid, bucket.index);
  }
  return step_through_equals(bucket.before, target);
}

// A grid over the bits in which the keys of the group differ.
PrefixFinder::Grid PrefixFinder::group_grid() const {
  const int32_t differing = set_in_any_ ^ set_in_all_;
  const int bits = 32 - __builtin_clz(static_cast<uint32_t>(differing));
  const int64_t common = int64_t{set_in_all_} >> bits << bits;
  return {static_cast<int32_t>(common), std::max(0, bits - kBucketBits)};
}

// Appends to the group the positions of [begin, end) with a key in [low, high); branch-free. In
// place when position_of reads the group.
template <typename PositionOf>
void PrefixFinder::append(int64_t begin, int64_t end, int32_t low, int32_t high,
                          PositionOf position_of) {
  const int32_t* keys = candidates_->keys.data();
  int32_t* group = group_.data();
  int64_t count = group_size_;
  for (int64_t i = begin; i < end; ++i) {
    const auto p = static_cast<int32_t>(position_of(i));
    const int32_t hit = -static_cast<int32_t>(keys[p] >= low && keys[p] < high);
    group[count] = p;
    count -= hit;
    set_in_any_ |= keys[p] & hit;
    set_in_all_ &= keys[p] | ~hit;
  }
  group_size_ = count;
}

void PrefixFinder::narrow(Grid grid, int32_t bucket) {
  const int64_t size = group_size_;
  const int64_t low = grid.origin + (int64_t{bucket} << grid.shift);
  group_size_ = 0;
  set_in_any_ = 0;
  set_in_all_ = -1;
  append(0, size, static_cast<int32_t>(low), static_cast<int32_t>(low + (int64_t{1} << grid.shift)),
         [group = group_.data()](int64_t i) { return group[i]; });
}

// Sixteen keys at a time, because most miss; where several hit, it may be a coin toss which.
void PrefixFinder::gather(Grid grid, int32_t bucket) {
  constexpr int kStep = 16;
  const int32_t low = bucket == 0 ? 0 : grid.origin + (bucket << grid.shift);
  const int32_t high = grid.origin + ((bucket + 1) << grid.shift);
  const __m128i below = _mm_set1_epi32(low - 1), above = _mm_set1_epi32(high);
  __m128i any = _mm_setzero_si128(), all = _mm_set1_epi32(-1);
  const int32_t* keys = candidates_->keys.data();
  int32_t* group = group_.data();
  int64_t count = 0, i = 0;
  for (; i + kStep <= candidates_->size; i += kStep) {
    __m128i hits[4];
    for (int v = 0; v < 4; ++v) {
      const __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i + 4 * v));
      hits[v] = _mm_and_si128(_mm_cmpgt_epi32(key, below), _mm_cmpgt_epi32(above, key));
      any = _mm_or_si128(any, _mm_and_si128(key, hits[v]));
      all = _mm_andnot_si128(_mm_andnot_si128(key, hits[v]), all);
    }
    const auto mask = static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(
        _mm_packs_epi32(hits[0], hits[1]), _mm_packs_epi32(hits[2], hits[3]))));
    const auto first = static_cast<int32_t>(i);
    if ((mask & (mask - 1)) == 0) {
      if (mask != 0) group[count++] = first + __builtin_ctz(mask);
    } else if (mask == 0xffff) {
      for (int32_t j = 0; j < kStep; ++j) group[count + j] = first + j;
      count += kStep;
    } else {
      for (int32_t j = 0; j < kStep; ++j) {
        group[count] = first + j;
        count += mask >> j & 1;
      }
    }
  }
  int32_t any_lanes[4], all_lanes[4];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(any_lanes), any);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(all_lanes), all);
  set_in_any_ = any_lanes[0] | any_lanes[1] | any_lanes[2] | any_lanes[3];
  set_in_all_ = all_lanes[0] & all_lanes[1] & all_lanes[2] & all_lanes[3];
  group_size_ = count;
  append(i, candidates_->size, low, high, [](int64_t j) { return j; });
}

Prefix PrefixFinder::walk_sorted(double before, double target) {
  const Candidates& c = *candidates_;
  std::sort(group_.begin(), group_.begin() + group_size_, [&c](int32_t a, int32_t b) {
    const int32_t key_a = c.keys[static_cast<size_t>(a)], key_b = c.keys[static_cast<size_t>(b)];
    return key_a != key_b ? key_a < key_b : a < b;
  });
  Prefix last{before, 0, 0};
  for (int64_t i = 0; i < group_size_ && last.mass < target; ++i) {
    const auto p = static_cast<size_t>(group_[static_cast<size_t>(i)]);
    if (c.weights[p] > 0) last = {last.mass + c.weights[p], c.keys[p], c.ids[p]};
  }
  return last;
}

// Equal keys have equal weights, so the step is a division.
Prefix PrefixFinder::step_through_equals(double before, double target) const {
  const Candidates& c = *candidates_;
  const double weight = c.weights[static_cast<size_t>(group_[0])];
  const double steps = std::ceil((target - before) / weight);
  const double count = std::clamp(steps, 1.0, static_cast<double>(group_size_));
  const auto p = static_cast<size_t>(group_[static_cast<size_t>(count) - 1]);
  return {before + count * weight, c.keys[p], c.ids[p]};
}

Prefix PrefixFinder::up_to(int32_t key) const {
  const Candidates& c = *candidates_;
  Prefix prefix{0, key, c.ids[static_cast<size_t>(c.size) - 1]};
  for (int64_t i = 0; i < c.size; ++i)
    if (c.keys[static_cast<size_t>(i)] <= key) prefix.mass += c.weights[static_cast<size_t>(i)];
  return prefix;
}

}  // namespace moechat
