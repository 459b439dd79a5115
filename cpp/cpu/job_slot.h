// The state of a running job that all workers of the thread pool share, and how they wait for it.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <vector>

#include "cpu/profiler.h"
#include "cpu/threads.h"

namespace moechat {

constexpr auto kForever = std::chrono::nanoseconds::max();

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                       std::chrono::nanoseconds at_most = kForever) {
  const timespec limit{static_cast<time_t>(at_most.count() / 1000000000),
                       static_cast<long>(at_most.count() % 1000000000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, at_most == kForever ? nullptr : &limit,
          nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Where the running job of one priority stands. Slots live as long as the pool, so a worker that
// comes late reads a slot, never a finished job.
//
// A claim word is end << 32 | next task, one for each node; the tasks of a phase without a division
// are all in the first. A worker that moved `next` on owns that task, and until it counts
// `remaining` down the phase cannot end: so everything else is read after the claim, and a worker
// whose compare-exchange was overtaken by whole phases still claims a task of the current one. That
// is why the word needs no serial number.
//
// Nor need the words change at once. `remaining` is written first and counts the tasks of words
// that are still to come, so the phase cannot end before the last word that has tasks; after it
// nothing may be written. A word that gets no tasks is left as it is: used up.
struct alignas(kLine) ClaimWord {
  std::atomic<uint64_t> word{0};
};

struct Slot {
  ClaimWord claims[kMaxNodes];
  int num_nodes = 1;
  alignas(kLine) std::atomic<int64_t> remaining{0};
  // Written by whoever opens a phase, while nobody owns a task.
  alignas(kLine) Job* job = nullptr;
  size_t next_phase = 0;
  const std::function<void(int64_t, int)>* body = nullptr;
  bool complete = false;
  std::atomic<bool> cut{false};  // the cancel flag was seen: the remaining tasks are skipped
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // written by the one who set `failed`
  std::atomic<bool> opening{false};  // a phase's `open` runs: a hint to workers that look for tasks
  // What the client waits for.
  enum : uint32_t { kRunning, kClientSleeps, kFinished };
  alignas(kLine) std::atomic<uint32_t> state{kFinished};
  // Turns of the clients of this priority.
  alignas(kLine) std::atomic<uint32_t> next_ticket{0};
  std::atomic<uint32_t> serving{0};
  Profiler profiler;

  void take_turn() {
    const uint32_t ticket = next_ticket.fetch_add(1);
    for (uint32_t now = serving.load(); now != ticket; now = serving.load())
      futex_wait(serving, now);
  }
  void end_turn() {
    serving.fetch_add(1);
    // A waiting destructor may have freed the slot: to the kernel the address is a mere number.
    futex_wake(serving, std::numeric_limits<int>::max());
  }
  void wait_until_idle() {
    for (uint32_t now = serving.load(); now != next_ticket.load(); now = serving.load())
      futex_wait(serving, now);
  }

  bool runs() const { return state.load(std::memory_order_seq_cst) != kFinished; }
  bool has_task() const {
    for (int n = 0; n < num_nodes; ++n) {
      const uint64_t word = claims[n].word.load(std::memory_order_seq_cst);
      if (static_cast<uint32_t>(word) < word >> 32) return true;
    }
    return false;
  }

  // The claimed task, one of `node` if there is any, or -1.
  int64_t claim_task(int node) {
    for (int n = 0; n < num_nodes; ++n) {
      std::atomic<uint64_t>& claim = claims[node].word;
      uint64_t word = claim.load(std::memory_order_acquire);
      while (static_cast<uint32_t>(word) < word >> 32)
        if (claim.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel))
          return static_cast<uint32_t>(word);
      if (++node == num_nodes) node = 0;
    }
    return -1;
  }

  // Makes tasks [0, tasks) claimable, divided as a phase says.
  void publish(int64_t tasks, const std::vector<int64_t>* node_begin) {
    uint64_t words[kMaxNodes] = {static_cast<uint64_t>(tasks) << 32};
    if (node_begin != nullptr && !node_begin->empty())
      for (size_t n = 0; n < static_cast<size_t>(num_nodes); ++n) {
        const int64_t end = n + 1 < node_begin->size() ? (*node_begin)[n + 1] : tasks;
        const int64_t begin = (*node_begin)[n];
        words[n] =
            begin < end ? static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(begin) : 0;
      }
    remaining.store(tasks, std::memory_order_relaxed);
    for (int n = 0; n < num_nodes; ++n)
      if (words[n] != 0) claims[n].word.store(words[n], std::memory_order_seq_cst);
  }

  // Looked at before every task and every phase; once true it stays true for this job.
  bool cancelled() {
    if (job->cancel != nullptr && job->cancel->raised()) cut.store(true);
    return cut.load();
  }

  // Keeps the exception being handled, unless another came first.
  void fail() {
    if (!failed.exchange(true)) error = std::current_exception();
  }
};

}  // namespace moechat
