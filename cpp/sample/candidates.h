// The tokens that may be drawn, and prefixes of their falling order, found without sorting them.
#pragma once
#include <cstdint>
#include <vector>

namespace moechat {

// Falling order: probability falling, then id rising. Probabilities compare by the distance of the
// logit to the best logit in float32, whose bits (the `key`) order like the distance itself.
struct Candidates {
  std::vector<int32_t> keys;   // >= 0
  std::vector<float> weights;  // >= 0; a probability up to a common factor; equal for equal keys
  std::vector<int32_t> ids;    // rising
  int64_t size = 0;            // used elements of each

  void allocate(int64_t capacity);
};

// A prefix of the falling order, named by its last candidate.
struct Prefix {
  double mass;  // sum of its weights
  int32_t key;
  int32_t id;

  bool contains(int32_t other_key, int32_t other_id) const {
    return other_key < key || (other_key == key && other_id <= id);
  }
};

// Radix selection by mass: sum the weights per bucket of keys, find the bucket in which the mass is
// reached, go on inside it. Linear time whatever the order of the logits.
class PrefixFinder {
 public:
  void allocate(int64_t capacity);
  // Sums up `candidates`, which must stay as they are until the last find(). At least one needs a
  // positive weight, and none a key above `largest_key`.
  void begin(const Candidates& candidates, int32_t largest_key);
  double total() const { return total_; }
  // The shortest prefix with mass >= target > 0; all candidates that weigh anything when rounding
  // lets no prefix reach it. The last candidate has a positive weight.
  Prefix find(double target);
  // All candidates with key <= `key`.
  Prefix up_to(int32_t key) const;

 private:
  // Bucket b holds keys in [origin + (b << shift), origin + ((b + 1) << shift)); lower ones are in
  // bucket 0.
  struct Grid {
    int32_t origin;
    int shift;
  };
  struct Bucket {
    int32_t index;
    double before;  // mass of the buckets before it
  };

  template <typename PositionOf, typename BucketOf>
  void sum_buckets(int64_t size, PositionOf position_of, BucketOf bucket_of,
                   std::vector<double>& sums);
  static Bucket reach(const std::vector<double>& sums, double before, double target);
  void gather(Grid grid, int32_t bucket);
  void narrow(Grid grid, int32_t bucket);
  template <typename PositionOf>
  void append(int64_t begin, int64_t end, int32_t low, int32_t high, PositionOf position_of);
  Grid group_grid() const;
  Prefix walk_sorted(double before, double target);
  Prefix step_through_equals(double before, double target) const;

  const Candidates* candidates_ = nullptr;
  double total_ = 0;
  Grid top_grid_{};
  std::vector<double> top_sums_, inner_sums_, partial_sums_;
  // The candidates of one bucket.
  std::vector<int32_t> group_;  // their positions, rising
  int64_t group_size_ = 0;
  int32_t set_in_any_ = 0, set_in_all_ = 0;  // bits of their keys
};

}  // namespace moechat
