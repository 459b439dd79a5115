#include "cpu/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>

#include "common/status.h"
#include "cpu/features.h"
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
constexpr size_t kLine = 128;  // two cache lines: the hardware prefetches them in pairs

using Clock = std::chrono::steady_clock;
double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Polls `ready` for at most kSpin; false when the time is up.
template <typename Ready>
bool spin_until(Ready ready) {
  const auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
  } while (Clock::now() < deadline);
  return false;
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

// Where the running job of one priority stands. Slots live as long as the pool, so a worker that
// comes late reads a slot, never a finished job.
//
// `claim` is tasks << 32 | next task. A worker that moved `next` on owns that task, and until it
// counts `remaining` down the phase cannot end: so everything else is read after the claim, and a
// worker whose compare-exchange was overtaken by whole phases still claims a task of the current
// one. That is why the word needs no serial number.
struct Slot {
  alignas(kLine) std::atomic<uint64_t> claim{0};
  alignas(kLine) std::atomic<int64_t> remaining{0};
  // Written by whoever opens a phase, while nobody owns a task.
  alignas(kLine) Job* job = nullptr;
  size_t next_phase = 0;
  const std::function<void(int64_t, int)>* body = nullptr;
  bool complete = false;
  std::atomic<bool> cut{false};  // the cancel flag was seen: the remaining tasks are skipped
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // written by the one who set `failed`
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

  bool has_task() const {
    const uint64_t word = claim.load(std::memory_order_seq_cst);
    return static_cast<uint32_t>(word) < word >> 32;
  }

  // The claimed task, or -1.
  int64_t claim_task() {
    uint64_t word = claim.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(word) < word >> 32)
      if (claim.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel))
        return static_cast<uint32_t>(word);
    return -1;
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

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(int count);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool run(Slot& slot, Job& job);
  void advance(Slot& slot, bool by_worker);
  void wake_workers(int64_t count);
  void work(int worker);
  bool run_task(int worker);
  void sleep();
  void join();
  bool anything_to_do() const {
    return stopping.load() || slots[0].has_task() || slots[1].has_task();
  }

  const int num_threads;
  const bool client_spins;  // only when a CPU is left for it: a spinning client delays a worker
  std::vector<std::thread> threads;
  uint8_t* scratch = nullptr;  // of every worker: kMatmulScratchBytes, then its kept inputs
  std::vector<KeptInputs> kept_inputs;  // [worker][place]
  Slot slots[kNumPriorities];
  alignas(kLine) std::atomic<uint32_t> wake_serial{0};  // sleeping workers wait for it to move
  std::atomic<int> sleepers{0};
  std::atomic<bool> stopping{false};
  bool profiling = false;
};

ThreadPool::Impl::Impl(int count)
    : num_threads(count), client_spins(count < available_cpus()) {
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
      threads.emplace_back([this, worker] { work(worker); });
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

bool ThreadPool::Impl::run(Slot& slot, Job& job) {
  slot.take_turn();
  slot.job = &job;
  slot.next_phase = 0;
  slot.complete = false;
  slot.failed.store(false);
  slot.cut.store(false);
  slot.state.store(Slot::kRunning);
  advance(slot, /*by_worker=*/false);
  const auto finished = [&slot] { return slot.state.load() == Slot::kFinished; };
  if (!(client_spins && spin_until(finished))) {
    uint32_t expected = Slot::kRunning;
    slot.state.compare_exchange_strong(expected, Slot::kClientSleeps);
    while (!finished()) futex_wait(slot.state, Slot::kClientSleeps);
  }
  const bool complete = slot.complete;
  const std::exception_ptr error = std::move(slot.error);
  slot.error = nullptr;
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
    try {
      tasks = phase.open();
      if (tasks < 0 || tasks > kMaxTasks)
        throw Status("bad-argument", "a phase of " + std::to_string(tasks) + " tasks");
    } catch (...) {
      slot.fail();
      break;
    }
    if (profiling) slot.profiler.begin(phase.name, tasks, before, Clock::now());
    if (tasks == 0) {
      if (profiling) slot.profiler.end();
      continue;
    }
    slot.body = &phase.run;
    slot.remaining.store(tasks, std::memory_order_relaxed);
    slot.claim.store(static_cast<uint64_t>(tasks) << 32, std::memory_order_seq_cst);
    // A worker takes the first decode task itself; prefill tasks it may leave to others.
    wake_workers(by_worker && &slot == &slots[0] ? tasks - 1 : tasks);
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
    if (!spin_until([this] { return anything_to_do(); })) sleep();
    if (stopping.load()) return;
  }
}

// One task of the most urgent job that has one.
bool ThreadPool::Impl::run_task(int worker) {
  for (Slot& slot : slots) {
    const int64_t task = slot.claim_task();
    if (task < 0) continue;
    const Clock::time_point began = profiling ? Clock::now() : Clock::time_point{};
    try {
      if (!slot.cancelled()) (*slot.body)(task, worker);
    } catch (...) {
      slot.fail();
    }
    if (profiling)
      slot.profiler.busy[static_cast<size_t>(worker)].seconds +=
          seconds_between(began, Clock::now());
    if (slot.remaining.fetch_sub(1, std::memory_order_acq_rel) == 1)
      advance(slot, /*by_worker=*/true);
    return true;
  }
  return false;
}

void ThreadPool::Impl::sleep() {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t serial = wake_serial.load();
  if (!anything_to_do()) futex_wait(wake_serial, serial);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw Status("bad-argument", "threads must be between 1 and " + std::to_string(kMaxThreads) +
                                     ", not " + std::to_string(num_threads));
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return impl_->num_threads; }

bool ThreadPool::run(Priority priority, Job& job) {
  return impl_->run(impl_->slots[static_cast<int>(priority)], job);
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
