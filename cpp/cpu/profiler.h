// Where the time of a job's phases went (PhaseTimes), kept by the thread pool.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "cpu/threads.h"

namespace moechat {

constexpr size_t kLine = 128;  // two cache lines: the hardware prefetches them in pairs

using Clock = std::chrono::steady_clock;
inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// Times of the phase that runs and of those before it. Workers write their own element of `busy`
// while they own a task; whoever opens the next phase reads them.
struct Profiler {
  struct alignas(kLine) Busy {
    double seconds = 0;
  };
  std::vector<Busy> busy;
  std::vector<PhaseTimes> phases;
  PhaseTimes* current = nullptr;
  Clock::time_point opened;

  void begin(const char* name, int64_t tasks, Clock::time_point before, Clock::time_point after) {
    current = nullptr;
    for (PhaseTimes& known : phases)
      if (std::strcmp(known.name, name) == 0) current = &known;
    if (current == nullptr) {
      phases.emplace_back();
      current = &phases.back();
      current->name = name;
    }
    ++current->count;
    current->tasks += tasks;
    current->open_seconds += seconds_between(before, after);
    opened = after;
  }

  void end() {
    if (current == nullptr) return;
    current->wall_seconds += seconds_between(opened, Clock::now());
    double longest = 0;
    for (Busy& worker : busy) {
      current->busy_seconds += worker.seconds;
      longest = std::max(longest, worker.seconds);
      worker.seconds = 0;
    }
    current->longest_seconds += longest;
    current = nullptr;
  }
};

}  // namespace moechat
