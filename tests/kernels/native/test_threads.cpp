// The thread pool: order, exactly-once, priority, cancel, errors, sleep, shutdown.
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/status.h"
#include "cpu/division.h"
#include "cpu/threads.h"
#include "kernels/matmul/matmul.h"

namespace {

using namespace moechat;
using namespace std::chrono_literals;

double cpu_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void wait_for(const std::atomic<bool>& flag) {
  for (int i = 0; i < 5000 && !flag.load(); ++i) std::this_thread::sleep_for(1ms);
  CHECK(flag.load());
}

// Each task once, by a valid worker, never before the phase before it is complete.
void check_order(int num_threads, int num_jobs) {
  ThreadPool pool(num_threads);
  CHECK(pool.num_threads() == num_threads);
  const std::vector<int64_t> sizes = {3, 0, 1, 200, 0, 0, 1, 2, 17, 1, 1, 64, 0};
  for (int j = 0; j < num_jobs; ++j) {
    std::vector<std::vector<int>> runs;
    for (const int64_t size : sizes) runs.emplace_back(static_cast<size_t>(size), 0);
    std::atomic<int> bad_workers{0};
    size_t opened = 0;
    Job job;
    for (size_t p = 0; p < sizes.size(); ++p)
      job.phases.push_back({[&, p]() -> int64_t {
                              CHECK(opened++ == p);
                              for (size_t q = 0; q < p; ++q)
                                for (const int count : runs[q]) CHECK(count == 1);
                              return sizes[p];
                            },
                            [&, p](int64_t task, int worker) {
                              if (worker < 0 || worker >= num_threads) ++bad_workers;
                              ++runs[p][static_cast<size_t>(task)];
                            }});
    CHECK(pool.run(j % 2 == 0 ? Priority::kDecode : Priority::kPrefill, job));
    CHECK(opened == sizes.size());
    CHECK(bad_workers == 0);
    for (const auto& phase : runs)
      for (const int count : phase) CHECK(count == 1);
  }
  Job empty;
  CHECK(pool.run(Priority::kDecode, empty));
}

// Both priorities from several clients at once; jobs of one priority never overlap.
void check_clients() {
  ThreadPool pool(3);
  std::atomic<int> running[2] = {{0}, {0}};
  std::atomic<int64_t> tasks{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c)
    clients.emplace_back([&, c] {
      const int priority = c % 2;
      for (int j = 0; j < 100; ++j) {
        Job job;
        job.phases.push_back({[&] {
                                CHECK(running[priority].fetch_add(1) == 0);
                                return int64_t{5};
                              },
                              [&](int64_t, int) { ++tasks; }});
        job.phases.push_back({[] { return int64_t{3}; }, [&](int64_t, int) { ++tasks; }});
        job.phases.push_back({[&] {
                                CHECK(running[priority].fetch_sub(1) == 1);
                                return int64_t{0};
                              },
                              {}});
        CHECK(pool.run(static_cast<Priority>(priority), job));
      }
    });
  for (std::thread& client : clients) client.join();
  CHECK(tasks == 4 * 100 * 8);
}

// With one worker, a decode job that arrives during a prefill task runs whole before the next one.
void check_priority() {
  ThreadPool pool(1);
  std::string order;
  std::atomic<bool> prefill_at_work{false}, decode_opened{false};
  Job prefill, decode;
  prefill.phases.push_back({[] { return int64_t{4}; },
                            [&](int64_t task, int) {
                              order += 'p';
                              if (task != 1) return;
                              prefill_at_work = true;
                              wait_for(decode_opened);
                              std::this_thread::sleep_for(20ms);  // until it is published, too
                            }});
  for (int p = 0; p < 3; ++p)
    decode.phases.push_back({[&] {
                               decode_opened = true;
                               return int64_t{2};
                             },
                             [&](int64_t, int) { order += 'd'; }});
  std::thread client([&] { pool.run(Priority::kPrefill, prefill); });
  wait_for(prefill_at_work);
  pool.run(Priority::kDecode, decode);
  client.join();
  CHECK(order == "ppddddddpp");
}

// A prefill job that outlasts it, and what ran beside it while `decode` did.
struct Beside {
  std::atomic<int64_t> decode_tasks[4] = {}, prefill_tasks[4] = {};  // of each worker
  std::atomic<int64_t> decode_ns{0}, prefill_ns{0};
};

void run_beside(ThreadPool& pool, int phases, int tasks, Beside* seen) {
  CancelFlag stop;
  std::atomic<bool> prefill_at_work{false}, decode_at_work{false};
  const auto timed_sleep = [](std::atomic<int64_t>& ns) {
    const auto began = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(300us);
    ns += (std::chrono::steady_clock::now() - began).count();
  };
  Job prefill, decode;
  prefill.cancel = &stop;
  prefill.phases.push_back({[] { return int64_t{1} << 17; },
                            [&](int64_t, int worker) {
                              prefill_at_work = true;
                              std::atomic<int64_t> outside{0};
                              const bool counts = decode_at_work;
                              timed_sleep(counts ? seen->prefill_ns : outside);
                              if (counts) ++seen->prefill_tasks[worker];
                            }});
  decode.phases.push_back({[&] {
                             decode_at_work = true;
                             return int64_t{0};
                           },
                           {}});
  for (int p = 0; p < phases; ++p)
    decode.phases.push_back({[tasks] { return int64_t{tasks}; },
                             [&](int64_t, int worker) {
                               ++seen->decode_tasks[worker];
                               timed_sleep(seen->decode_ns);
                             }});
  decode.phases.push_back({[&] {
                             decode_at_work = false;
                             return int64_t{0};
                           },
                           {}});
  std::thread client([&] { CHECK(!pool.run(Priority::kPrefill, prefill)); });
  wait_for(prefill_at_work);
  CHECK(pool.run(Priority::kDecode, decode));
  stop.raise();
  client.join();
}

// While both work, whole workers are decode's or prefill's; a divided one owes both.
void check_division() {
  {
    ThreadPool pool(2);
    Beside seen;
    run_beside(pool, 50, 3, &seen);
    CHECK(seen.decode_tasks[0] == 0 && seen.decode_tasks[1] == 150);
    CHECK(seen.prefill_tasks[1] <= 1);  // claimed before decode began
    CHECK(seen.prefill_tasks[0] > 0);
  }
  {
    ThreadPool pool(4);
    pool.set_decode_share(0.25);
    Beside seen;
    run_beside(pool, 50, 3, &seen);
    CHECK(seen.decode_tasks[3] == 150 && seen.prefill_tasks[3] <= 1);
  }
  for (const double share : {0.25, 0.5, 0.8}) {
    ThreadPool pool(1);
    pool.set_decode_share(share);
    Beside seen;
    run_beside(pool, 100, 1, &seen);
    const auto decode = static_cast<double>(seen.decode_ns);
    const double got = decode / (decode + static_cast<double>(seen.prefill_ns));
    CHECK(got > share - 0.15 && got < share + 0.15);
  }
  ThreadPool pool(1);
  for (const double share : {0.0, 1.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    std::string name;
    try {
      pool.set_decode_share(share);
    } catch (const Status& status) {
      name = status.name;
    }
    CHECK(name == "bad-argument");
  }
}

// The flag is looked at before every phase and every task. On one thread the outcome is exact: the
// first task of a phase raises, the other three are skipped, and the job is not complete.
void check_cancel() {
  ThreadPool pool(1);
  for (int raised_in = -1; raised_in < 3; ++raised_in) {
    CancelFlag cancel;
    int opened = 0, tasks = 0;
    Job job;
    job.cancel = &cancel;
    for (int p = 0; p < 3; ++p)
      job.phases.push_back({[&] {
                              ++opened;
                              return int64_t{4};
                            },
                            [&, p](int64_t, int) {
                              ++tasks;
                              if (p == raised_in) cancel.raise();
                            }});
    if (raised_in < 0) cancel.raise();
    CHECK(!pool.run(Priority::kPrefill, job));
    CHECK(opened == raised_in + 1);
    CHECK(tasks == (raised_in < 0 ? 0 : 4 * raised_in + 1));
  }
  // Raised by the very last task: nothing was skipped, the job is complete.
  CancelFlag late;
  Job job;
  job.cancel = &late;
  job.phases.push_back({[] { return int64_t{4}; },
                        [&](int64_t task, int) {
                          if (task == 3) late.raise();
                        }});
  CHECK(pool.run(Priority::kPrefill, job));
}

void check_errors() {
  ThreadPool pool(2);
  for (int thrown_in = 0; thrown_in < 3; ++thrown_in) {
    int opened = 0;
    std::string caught;
    Job job;
    for (int p = 0; p < 3; ++p)
      job.phases.push_back({[&, p]() -> int64_t {
                              ++opened;
                              if (p == thrown_in) throw Status("non-finite-logits", "layer 7");
                              return 4;
                            },
                            [](int64_t, int) {}});
    try {
      pool.run(Priority::kDecode, job);
    } catch (const Status& status) {
      caught = status.name + ": " + status.what();
    }
    CHECK(caught == "non-finite-logits: layer 7");
    CHECK(opened == thrown_in + 1);
  }
  // Even what must not throw ends the job, not the process.
  bool caught = false, opened_next = false;
  Job job;
  job.phases.push_back({[] { return int64_t{8}; },
                        [](int64_t, int) { throw std::runtime_error("out of memory"); }});
  job.phases.push_back({[&]() -> int64_t {
                          opened_next = true;
                          return 0;
                        },
                        {}});
  try {
    pool.run(Priority::kDecode, job);
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught && !opened_next);
  for (const int64_t tasks : {int64_t{-1}, int64_t{1} << 32}) {
    Job odd;
    odd.phases.push_back({[tasks] { return tasks; }, [](int64_t, int) {}});
    std::string name;
    try {
      pool.run(Priority::kDecode, odd);
    } catch (const Status& status) {
      name = status.name;
    }
    CHECK(name == "bad-argument");
  }
  for (const int threads : {0, -1, 257}) {
    std::string name;
    try {
      ThreadPool refused(threads);
    } catch (const Status& status) {
      name = status.name;
    }
    CHECK(name == "bad-argument");
  }
}

// Idle workers and waiting clients use no CPU; workers leave signals to the process.
void check_sleep() {
  ThreadPool pool(3);
  std::atomic<bool> blocked{false};
  Job job;
  job.phases.push_back({[] { return int64_t{1}; },
                        [&](int64_t, int) {
                          sigset_t mask;
                          pthread_sigmask(SIG_SETMASK, nullptr, &mask);
                          blocked = sigismember(&mask, SIGINT) == 1;
                          std::this_thread::sleep_for(100ms);
                        }});
  const double client_before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  pool.run(Priority::kDecode, job);
  CHECK(cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - client_before < 0.02);
  CHECK(blocked);
  std::this_thread::sleep_for(10ms);
  const double before = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  std::this_thread::sleep_for(200ms);
  CHECK(cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - before < 0.01);
}

void check_shutdown() {
  auto pool = std::make_unique<ThreadPool>(2);
  std::atomic<bool> at_work{false};
  std::atomic<int> done{0};
  std::atomic<bool> complete{false};
  ThreadPool* raw = pool.get();
  std::thread client([&, raw] {
    Job job;
    for (int p = 0; p < 4; ++p)
      job.phases.push_back({[] { return int64_t{4}; },
                            [&](int64_t, int) {
                              at_work = true;
                              std::this_thread::sleep_for(2ms);
                              ++done;
                            }});
    complete = raw->run(Priority::kPrefill, job);
  });
  wait_for(at_work);
  pool.reset();
  CHECK(done == 16);
  client.join();
  CHECK(complete);
}

void check_scratch() {
  ThreadPool pool(3);
  for (int worker = 0; worker < 3; ++worker) {
    CHECK(reinterpret_cast<uintptr_t>(pool.scratch(worker)) % 64 == 0);
    std::memset(pool.scratch(worker), worker + 1, kMatmulScratchBytes);
  }
  for (int worker = 0; worker < 3; ++worker) {
    const auto* bytes = static_cast<const uint8_t*>(pool.scratch(worker));
    CHECK(bytes[0] == worker + 1 && bytes[kMatmulScratchBytes - 1] == worker + 1);
  }
}

// 50 workers at 0.58 are 28.999999999999996 of them, and no more than 29.
void check_share_of_workers() {
  for (int workers = 1; workers <= 128; ++workers)
    for (int percent = 1; percent < 100; ++percent) {
      Division division(workers);
      division.set_share(percent / 100.0);
      int whole = 0, between = 0;
      for (int worker = 0; worker < workers; ++worker) {
        whole += division.decode_only(worker);
        between += division.divided(worker);
      }
      CHECK(whole == workers * percent / 100);
      CHECK(between == (workers * percent % 100 != 0));
    }
}

}  // namespace

void test_threads() {
  for (const int num_threads : {1, 2, 3, 16}) check_order(num_threads, 60);
  check_clients();
  check_priority();
  check_division();
  check_share_of_workers();
  check_cancel();
  check_errors();
  check_sleep();
  check_shutdown();
  check_scratch();
}
