// How the workers of the thread pool are divided while decode and prefill both have a job.
//
// Every worker has a part for decode, and the parts add up to share * workers. A part of 1: only
// decode tasks, idle while there are none. A step is many short phases, and one that must wait for
// a worker inside a prefill task takes as long as that task; a worker kept free costs prefill no
// more than the share says. A part of 0: prefill tasks first, decode tasks while prefill has none.
// At most one worker has a part in between: decode tasks first until it owes prefill a while, which
// is as long as a prefill task, so that short steps run whole.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/profiler.h"

namespace moechat {

class Division {
 public:
  static constexpr double kDefaultShare = 0.5;
  // Decode goes on for so long after a job: sampling, packets, the next step's rows.
  static constexpr auto kBetweenSteps = std::chrono::milliseconds(2);

  static constexpr double kOwedSeconds = 1e-3;

  explicit Division(int num_workers) : workers_(static_cast<size_t>(num_workers)) {
    set_share(kDefaultShare);
  }

  // Call while no job runs. 0 < share < 1.
  void set_share(double share) {
    const auto count = static_cast<double>(workers_.size());
    const double rest = share * count - std::floor(share * count + 1e-9);
    bool rest_given = rest < 1e-6;
    for (size_t w = 0; w < workers_.size(); ++w) {
      // Spread, so that every node has some of both.
      const double before = static_cast<double>(w) * share + 1e-9;
      const bool whole = std::floor(before + share) > std::floor(before);
      workers_[w].part = whole ? 1.0 : rest_given ? 0.0 : rest;
      rest_given = rest_given || !whole;
      workers_[w].owed = 0;
    }
  }

  void decode_begins() { decode_until_.store(kOpen, std::memory_order_release); }
  void decode_ends() {
    decode_until_.store(ticks(Clock::now() + kBetweenSteps), std::memory_order_release);
  }
  bool decode_works() const {
    const int64_t until = decode_until_.load(std::memory_order_acquire);
    return until == kOpen || (until != 0 && ticks(Clock::now()) < until);
  }

  bool decode_only(int worker) const { return at(worker).part == 1; }
  bool divided(int worker) const { return at(worker).part > 0 && at(worker).part < 1; }
  bool prefill_first(int worker) const {
    return at(worker).part == 0 || (at(worker).part < 1 && at(worker).owed > kOwedSeconds);
  }
  // Of a divided worker, by that worker: what it did while both had a job.
  void count(int worker, bool decode, double seconds) {
    Worker& own = workers_[static_cast<size_t>(worker)];
    own.owed += decode ? seconds * (1 - own.part) : -seconds * own.part;
  }

 private:
  static constexpr int64_t kOpen = std::numeric_limits<int64_t>::max();
  struct alignas(kLine) Worker {
    double part = 0;
    double owed = 0;  // to prefill, seconds
  };
  static int64_t ticks(Clock::time_point time) { return time.time_since_epoch().count(); }
  const Worker& at(int worker) const { return workers_[static_cast<size_t>(worker)]; }

  std::vector<Worker> workers_;
  alignas(kLine) std::atomic<int64_t> decode_until_{0};
};

}  // namespace moechat
