// Tokens on their way from the decode thread to the caller: bounded, so that decode never runs far
// ahead of a slow reader.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace moechat {

struct TimedToken {
  int32_t id;
  double seconds;  // monotonic clock when it was sampled
};

class TokenQueue {
 public:
  static constexpr size_t kCapacity = 64;

  // Tokens that may be pushed before the reader takes some.
  int64_t room() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(kCapacity) - static_cast<int64_t>(tokens_.size());
  }
  void push(int32_t id) {
    const double now =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    const std::lock_guard<std::mutex> lock(mutex_);
    tokens_.push_back({id, now});
    changed_.notify_one();
  }
  // No more tokens will come; a waiting reader wakes.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  // All tokens there are, after waiting for at least one, close() or the timeout.
  // `finished`: closed and nothing left.
  std::vector<TimedToken> pop(double timeout_seconds, bool* finished) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                      [this] { return closed_ || !tokens_.empty(); });
    std::vector<TimedToken> taken(tokens_.begin(), tokens_.end());
    tokens_.clear();
    *finished = closed_ && taken.empty();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TimedToken> tokens_;
  bool closed_ = false;
};

}  // namespace moechat
