// The thread pool (design 3.7): one pool, two clients. While both work, the workers are divided
// (division.h); otherwise any of them takes any task, decode's first.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/topology.h"

namespace moechat {

struct KeptInputs;

enum class Priority : int { kDecode = 0, kPrefill = 1 };

// A request to stop that any thread may raise. Polled before every phase and task of a job.
class CancelFlag {
 public:
  void raise() { raised_.store(true, std::memory_order_release); }
  void clear() { raised_.store(false, std::memory_order_release); }
  bool raised() const { return raised_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> raised_{false};
};

// A phase opens with `open`, run once by whichever thread finished the phase before; it does the
// serial work and returns how many tasks follow (0: straight on to the next phase). Then
// run(task, worker) is called once for every task in [0, tasks), by any workers, in any order;
// `worker` is in [0, num_threads). The next phase opens only when all tasks are done.
// Once the flag is seen the remaining tasks are skipped, so the data of a cut job are worthless.
// `open` may throw Status: the job ends and run() rethrows it. `run` must not throw.
//
// A phase's tasks may belong to the nodes of the pool's topology: [node_begin[n], node_begin[n + 1])
// are node n's, whose workers take them before those of other nodes. Any worker takes any task in the
// end, so a node that is busy with something else never stalls a job.
struct Phase {
  std::function<int64_t()> open;
  std::function<void(int64_t task, int worker)> run;
  const char* name = "other";  // a literal: what profiles call it
  // Read after `open`: empty, or as many as nodes, from 0 on, ascending. Null: no node's.
  const std::vector<int64_t>* node_begin = nullptr;
};

// Phases in order, and the flag that cuts the job short. A job may be run again and again.
struct Job {
  std::vector<Phase> phases;
  const CancelFlag* cancel = nullptr;  // may be null
};

// Where the time of all phases of one name went. Of num_threads workers each is busy for some of
// the wall time; the longest one's share over the mean is the imbalance.
struct PhaseTimes {
  const char* name = "";
  int64_t count = 0, tasks = 0;
  double open_seconds = 0;     // serial: `open`
  double wall_seconds = 0;     // from the end of `open` to the end of the last task
  double busy_seconds = 0;     // inside tasks, summed over the workers
  double longest_seconds = 0;  // of it, the busiest worker's, summed over the phases
};

class ThreadPool {
 public:
  // 1..256 threads, else Status "bad-argument". With more than one node, workers are bound to the
  // CPUs of their node; with `pin`, each to a single one.
  explicit ThreadPool(int num_threads, const Topology& topology = Topology::single(),
                      bool pin = false);
  ~ThreadPool();                         // waits for running jobs; joins the threads
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;
  const Topology& topology() const;
  // Runs the job on the pool's threads and returns when its last phase is done; the calling thread
  // sleeps meanwhile (after at most 50 us of spinning). One job a priority at a time: a second
  // caller of the same priority waits its turn. Returns false when the cancel flag cut the job.
  bool run(Priority priority, Job& job);
  // Of the workers, what decode gets while prefill works as well; 0.5 at first. Between 0 and 1,
  // else Status "bad-argument". Call while no job runs.
  void set_decode_share(double share);
  // Starts or stops keeping times, of jobs of either priority. Call while no job runs.
  void set_profiling(bool on);
  // What was kept of `priority` since profiling began, by name in the order of first use.
  std::vector<PhaseTimes> profile(Priority priority) const;
  // kMatmulScratchBytes of 64-byte aligned scratch, private to `worker`; pages appear with use.
  void* scratch(int worker) const;
  // Where `worker` keeps the inputs of that name (matmul.h); names that follow each other have
  // places of their own, kKeptPlaces of them.
  KeptInputs* kept_inputs(int worker, uint64_t wanted) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moechat
