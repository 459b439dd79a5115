#include "cpu/threads.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>

#include "common/status.h"
#include "cpu/division.h"
#include "cpu/features.h"
#include "cpu/job_slot.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kNumPriorities = 2;
constexpr int64_t kMaxTasks = std::numeric_limits<uint32_t>::max();
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 16;
constexpr size_t kKeptPlaces = 32;
constexpr size_t kWorkerBytes = kMatmulScratchBytes + kKeptPlaces * kKeptInputsBytes;

// Polls `ready` for kSpin after `goes_on` said no last; false when the time is up.
template <typename Ready, typename GoesOn>
bool spin_until(Ready ready, GoesOn goes_on) {
  Clock::time_point deadline = Clock::now() + kSpin, now;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
    now = Clock::now();
    if (goes_on()) deadline = now + kSpin;
  } while (now < deadline);
  return false;
}

// A phase's tasks, checked. Throws Status.
void check_tasks(int64_t tasks, const std::vector<int64_t>* node_begin, int num_nodes) {
  if (tasks < 0 || tasks > kMaxTasks)
    throw Status("bad-argument", "a phase of " + std::to_string(tasks) + " tasks");
  if (node_begin == nullptr || node_begin->empty()) return;
  if (static_cast<int>(node_begin->size()) != num_nodes || node_begin->front() != 0 ||
      node_begin->back() > tasks || !std::is_sorted(node_begin->begin(), node_begin->end()))
    throw Status("bad-argument", "a phase's tasks are divided over other nodes than there are");
}

}  // namespace

struct ThreadPool::Impl {
  Impl(int count, const Topology& where, bool pin);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool run(Slot& slot, Job& job);
  void advance(Slot& slot, bool by_worker);
  void wake_workers(int64_t count);
  void bind(int worker, bool pin) const;
  void work(int worker);
  bool run_task(int worker);
  bool run_task_of(Slot& slot, int worker, bool both);
  void sleep(int worker);
  void join();
  bool anything_to_do(int worker) const {
    return stopping.load() || slots[0].has_task() ||
           (slots[1].has_task() && !(division.decode_only(worker) && both_work()));
  }
  bool both_work() const { return slots[1].runs() && division.decode_works(); }

  const int num_threads;
  const Topology topology;
  const std::vector<int> nodes;  // of every worker
  const bool client_spins;  // only when a CPU is left for it: a spinning client delays a worker
  std::vector<std::thread> threads;
  uint8_t* scratch = nullptr;  // of every worker: kMatmulScratchBytes, then its kept inputs
  std::vector<KeptInputs> kept_inputs;  // [worker][place]
  Slot slots[kNumPriorities];
  Division division;
  alignas(kLine) std::atomic<uint32_t> wake_serial{0};  // sleeping workers wait for it to move
  std::atomic<int> sleepers{0};
  std::atomic<bool> stopping{false};
  bool profiling = false;
};

ThreadPool::Impl::Impl(int count, const Topology& where, bool pin)
    : num_threads(count),
      topology(where),
      nodes(where.nodes_of_workers(count)),
      client_spins(count < available_cpus()),
      division(count) {
  for (Slot& slot : slots) slot.num_nodes = topology.num_nodes();
  const size_t bytes = kWorkerBytes * static_cast<size_t>(count);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw Status("does-not-fit", "no memory for the threads' scratch");
  scratch = static_cast<uint8_t*>(memory);
  kept_inputs.resize(static_cast<size_t>(count) * kKeptPlaces);
  for (size_t i = 0; i < kept_inputs.size(); ++i)
    kept_inputs[i].memory = scratch + i / kKeptPlaces * kWorkerBytes + kMatmulScratchBytes +
                            i % kKeptPlaces * kKeptInputsBytes;
  // Signals meant for the process must reach the thread that waits for them (Python's main thread);
  // a fault of the thread itself must reach the thread.
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT})
    sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  bool started = true;
  try {
    threads.reserve(static_cast<size_t>(count));
    for (int worker = 0; worker < count; ++worker)
      threads.emplace_back([this, worker, pin] {
        bind(worker, pin);
        work(worker);
      });
  } catch (const std::exception&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) return;
  join();
  throw Status("does-not-fit", "the system refused to start " + std::to_string(count) + " threads");
}

ThreadPool::Impl::~Impl() {
  for (Slot& slot : slots) slot.wait_until_idle();
  join();
}

void ThreadPool::Impl::join() {
  stopping.store(true);
  wake_workers(num_threads);
  for (std::thread& thread : threads) thread.join();
  munmap(scratch, kWorkerBytes * static_cast<size_t>(num_threads));
}

void ThreadPool::Impl::bind(int worker, bool pin) const {
  const int node = nodes[static_cast<size_t>(worker)];
  const std::vector<int>& cpus = topology.nodes[static_cast<size_t>(node)].cpus;
  if (pin && !cpus.empty()) {
    const auto rank = std::count(nodes.begin(), nodes.begin() + worker, node);
    bind_thread({cpus[static_cast<size_t>(rank) % cpus.size()]});
  } else if (topology.num_nodes() > 1) {
    bind_thread(cpus);
  }
}

bool ThreadPool::Impl::run(Slot& slot, Job& job) {
  slot.take_turn();
  slot.job = &job;
  slot.next_phase = 0;
  slot.complete = false;
  slot.failed.store(false);
  slot.cut.store(false);
  if (&slot == &slots[0]) division.decode_begins();
  slot.state.store(Slot::kRunning);
  advance(slot, /*by_worker=*/false);
  const auto finished = [&slot] { return slot.state.load() == Slot::kFinished; };
  if (!(client_spins && spin_until(finished, [] { return false; }))) {
    uint32_t expected = Slot::kRunning;
    slot.state.compare_exchange_strong(expected, Slot::kClientSleeps);
    while (!finished()) futex_wait(slot.state, Slot::kClientSleeps);
  }
  const bool complete = slot.complete;
  const std::exception_ptr error = std::move(slot.error);
  slot.error = nullptr;
  if (&slot == &slots[0]) division.decode_ends();
  slot.end_turn();
  if (error) std::rethrow_exception(error);
  return complete;
}

// Opens the next phase that has tasks, or ends the job. Called while no task is owned: first by the
// client, then by whoever finished the last task of the phase before.
void ThreadPool::Impl::advance(Slot& slot, bool by_worker) {
  Job& job = *slot.job;
  if (profiling) slot.profiler.end();
  while (!slot.failed.load() && !slot.cut.load()) {
    if (slot.next_phase == job.phases.size()) {
      slot.complete = true;
      break;
    }
    if (slot.cancelled()) break;
    const Phase& phase = job.phases[slot.next_phase++];
    const Clock::time_point before = profiling ? Clock::now() : Clock::time_point{};
    int64_t tasks = 0;
    slot.opening.store(true, std::memory_order_relaxed);
    try {
      tasks = phase.open();
      check_tasks(tasks, phase.node_begin, topology.num_nodes());
    } catch (...) {
      slot.opening.store(false, std::memory_order_relaxed);
      slot.fail();
      break;
    }
    slot.opening.store(false, std::memory_order_relaxed);
    if (profiling) slot.profiler.begin(phase.name, tasks, before, Clock::now());
    if (tasks == 0) {
      if (profiling) slot.profiler.end();
      continue;
    }
    slot.body = &phase.run;
    slot.publish(tasks, phase.node_begin);
    // A worker takes the first decode task itself; prefill tasks it may leave to others. While both
    // work, those who sleep may be the ones who do not take such tasks.
    wake_workers(both_work() ? num_threads : by_worker && &slot == &slots[0] ? tasks - 1 : tasks);
    return;
  }
  if (slot.state.exchange(Slot::kFinished) == Slot::kClientSleeps) futex_wake(slot.state, 1);
}

// Call after making work visible. Either this sees the sleeper, or the sleeper sees the work.
void ThreadPool::Impl::wake_workers(int64_t count) {
  if (count == 0 || sleepers.load(std::memory_order_seq_cst) == 0) return;
  wake_serial.fetch_add(1);
  futex_wake(wake_serial, static_cast<int>(std::min<int64_t>(count, num_threads)));
}

void ThreadPool::Impl::work(int worker) {
  while (true) {
    while (run_task(worker)) {
    }
    // A phase that is being opened may wait for a GPU, and has tasks for all then.
    const auto opening = [this] { return slots[0].opening.load(std::memory_order_relaxed); };
    if (!spin_until([this, worker] { return anything_to_do(worker); }, opening)) sleep(worker);
    if (stopping.load()) return;
  }
}

// One task of the job that comes first, or else of the other: decode's, unless both work and the
// division says otherwise.
bool ThreadPool::Impl::run_task(int worker) {
  const bool both = both_work();
  if (both && division.decode_only(worker)) return run_task_of(slots[0], worker, both);
  const int first = both && division.prefill_first(worker) ? 1 : 0;
  return run_task_of(slots[first], worker, both) || run_task_of(slots[1 - first], worker, both);
}

bool ThreadPool::Impl::run_task_of(Slot& slot, int worker, bool both) {
  const int64_t task = slot.claim_task(nodes[static_cast<size_t>(worker)]);
  if (task < 0) return false;
  const bool counted = both && division.divided(worker);
  const bool timed = profiling || counted;
  const Clock::time_point began = timed ? Clock::now() : Clock::time_point{};
  try {
    if (!slot.cancelled()) (*slot.body)(task, worker);
  } catch (...) {
    slot.fail();
  }
  const double seconds = timed ? seconds_between(began, Clock::now()) : 0;
  if (profiling) slot.profiler.busy[static_cast<size_t>(worker)].seconds += seconds;
  if (counted) division.count(worker, &slot == &slots[0], seconds);
  if (slot.remaining.fetch_sub(1, std::memory_order_acq_rel) == 1)
    advance(slot, /*by_worker=*/true);
  return true;
}

void ThreadPool::Impl::sleep(int worker) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t serial = wake_serial.load();
  // One who leaves prefill tasks to others looks again when decode may have ended: nobody tells.
  const bool leaves_tasks = division.decode_only(worker) && slots[1].runs();
  if (!anything_to_do(worker))
    futex_wait(wake_serial, serial, leaves_tasks ? Division::kBetweenSteps : kForever);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

ThreadPool::ThreadPool(int num_threads, const Topology& topology, bool pin) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw Status("bad-argument", "threads must be between 1 and " + std::to_string(kMaxThreads) +
                                     ", not " + std::to_string(num_threads));
  check_topology(topology);
  impl_ = std::make_unique<Impl>(num_threads, topology, pin);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return impl_->num_threads; }

const Topology& ThreadPool::topology() const { return impl_->topology; }

bool ThreadPool::run(Priority priority, Job& job) {
  return impl_->run(impl_->slots[static_cast<int>(priority)], job);
}

void ThreadPool::set_decode_share(double share) {
  if (!(share > 0 && share < 1)) throw Status("bad-argument", "a decode share is between 0 and 1");
  impl_->division.set_share(share);
}

void ThreadPool::set_profiling(bool on) {
  for (Slot& slot : impl_->slots) {
    slot.profiler.busy.assign(static_cast<size_t>(impl_->num_threads), {});
    slot.profiler.phases.clear();
  }
  impl_->profiling = on;
}

std::vector<PhaseTimes> ThreadPool::profile(Priority priority) const {
  return impl_->slots[static_cast<int>(priority)].profiler.phases;
}

void* ThreadPool::scratch(int worker) const {
  return impl_->scratch + kWorkerBytes * static_cast<size_t>(worker);
}

KeptInputs* ThreadPool::kept_inputs(int worker, uint64_t wanted) const {
  KeptInputs& kept =
      impl_->kept_inputs[static_cast<size_t>(worker) * kKeptPlaces + wanted % kKeptPlaces];
  kept.wanted = wanted;
  kept.next_rows = nullptr;
  return &kept;
}

}  // namespace moechat
