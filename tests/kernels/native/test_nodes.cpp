// The thread pool on machines of several nodes, faked: nodes without CPUs bind no thread.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "common/status.h"
#include "cpu/job_slot.h"
#include "cpu/threads.h"

namespace {

using namespace moechat;
using namespace std::chrono_literals;

Topology faked(int num_nodes) { return {std::vector<Node>(static_cast<size_t>(num_nodes))}; }

// Each task of each phase once, in divided and undivided phases after each other, some of whose
// nodes have no task.
void check_every_task_once(int num_threads, int num_nodes) {
  ThreadPool pool(num_threads, faked(num_nodes));
  std::minstd_rand random(7);
  std::vector<std::vector<std::atomic<int>>> runs(50);
  std::vector<std::vector<int64_t>> divisions(runs.size());
  std::vector<int64_t> sizes(runs.size());
  Job job;
  for (size_t p = 0; p < runs.size(); ++p) {
    std::vector<int64_t>& division = divisions[p];
    for (int n = 0; n < num_nodes && p % 3 != 0; ++n) {
      division.push_back(sizes[p]);
      sizes[p] += random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 20);
    }
    if (division.empty()) sizes[p] = static_cast<int64_t>(random() % 40);
    runs[p] = std::vector<std::atomic<int>>(static_cast<size_t>(sizes[p]));
    Phase phase{[&, p]() -> int64_t {
                  if (p > 0)
                    for (const auto& count : runs[p - 1]) CHECK(count == 1);
                  return sizes[p];
                },
                [&, p](int64_t task, int) { ++runs[p][static_cast<size_t>(task)]; }};
    phase.node_begin = &division;
    job.phases.push_back(phase);
  }
  for (int repeat = 1; repeat <= 6; ++repeat) {
    CHECK(pool.run(repeat % 2 == 0 ? Priority::kDecode : Priority::kPrefill, job));
    for (auto& phase : runs)
      for (auto& count : phase) CHECK(count.exchange(0) == 1);
  }
}

// Whoever opens a phase may be overtaken by the end of it: words without tasks must not be written.
void check_words_without_tasks() {
  constexpr uint64_t kUsedUp = uint64_t{9} << 32 | 9;
  const std::vector<int64_t> division = {0, 0, 5, 5};
  for (const std::vector<int64_t>* node_begin :
       {static_cast<const std::vector<int64_t>*>(nullptr), &division}) {
    Slot slot;
    slot.num_nodes = 4;
    for (ClaimWord& claim : slot.claims) claim.word = kUsedUp;
    slot.publish(7, node_begin);
    const bool divided = node_begin != nullptr;
    CHECK(slot.claims[0].word == (divided ? kUsedUp : uint64_t{7} << 32));
    CHECK(slot.claims[1].word == (divided ? uint64_t{5} << 32 : kUsedUp));
    CHECK(slot.claims[2].word == kUsedUp);
    CHECK(slot.claims[3].word == (divided ? uint64_t{7} << 32 | 5 : kUsedUp));
    CHECK(slot.remaining == 7 && slot.claim_task(3) == (divided ? 5 : 0));
  }
}

// A worker alone takes its own node's tasks first, in order, and then the others'.
void check_own_node_first() {
  Topology topology = faked(3);
  topology.nodes[1].cpus.assign(100, 0);  // so that the only worker is its
  CHECK(topology.nodes_of_workers(1) == std::vector<int>{1});
  CHECK((faked(2).nodes_of_workers(3) == std::vector<int>{0, 0, 1}));
  const std::vector<int64_t> division = {0, 2, 4};
  std::vector<int64_t> order;
  Job job;
  Phase phase{[] { return int64_t{7}; }, [&](int64_t task, int) { order.push_back(task); }};
  phase.node_begin = &division;
  job.phases.push_back(phase);
  ThreadPool pool(1, topology);
  CHECK(pool.run(Priority::kDecode, job));
  CHECK((order == std::vector<int64_t>{2, 3, 4, 5, 6, 0, 1}));
}

// While the worker of node 1 is stuck in a task, that of node 0 does all the rest.
void check_others_help() {
  ThreadPool pool(2, faked(2));
  CHECK(pool.topology().nodes_of_workers(2) == (std::vector<int>{0, 1}));
  const std::vector<int64_t> division = {0, 10};
  std::atomic<int> done{0};
  std::vector<std::atomic<int>> worker_of(20);
  std::atomic<bool> stuck{false};
  std::atomic<int> stuck_worker{-1};
  Job job;
  Phase phase{[] { return int64_t{20}; },
              [&](int64_t task, int worker) {
                worker_of[static_cast<size_t>(task)] = worker;
                if (!stuck.exchange(true)) {  // the first to come waits for all others
                  stuck_worker = worker;
                  for (int i = 0; i < 5000 && done < 19; ++i) std::this_thread::sleep_for(1ms);
                  CHECK(done == 19);
                }
                ++done;
              }};
  phase.node_begin = &division;
  job.phases.push_back(phase);
  CHECK(pool.run(Priority::kPrefill, job));
  int by_stuck = 0;
  for (const auto& worker : worker_of) by_stuck += worker == stuck_worker;
  CHECK(by_stuck == 1);
}

// Bound to their node's CPUs, or to one of them; with a single node only when asked.
void check_binding() {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  if (cpus.size() < 2) return;
  const Node first{-1, {cpus[0]}}, second{-1, {cpus[1]}}, both{-1, {cpus[0], cpus[1]}};
  const auto cpus_of_workers = [](const Topology& topology, bool pin) {
    ThreadPool pool(2, topology, pin);
    std::vector<std::vector<int>> seen(2);
    std::atomic<int> arrived{0};
    Job job;
    job.phases.push_back({[] { return int64_t{2}; },
                          [&](int64_t, int worker) {
                            cpu_set_t set;
                            sched_getaffinity(0, sizeof set, &set);
                            for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
                              if (CPU_ISSET(cpu, &set))
                                seen[static_cast<size_t>(worker)].push_back(cpu);
                            ++arrived;  // each worker takes one task
                            while (arrived < 2) std::this_thread::sleep_for(1ms);
                          }});
    pool.run(Priority::kDecode, job);
    return seen;
  };
  using Sets = std::vector<std::vector<int>>;
  const Sets apart = {{cpus[0]}, {cpus[1]}};
  CHECK(cpus_of_workers({{first, second}}, false) == apart);
  CHECK(cpus_of_workers({{both}}, true) == apart);
  CHECK(cpus_of_workers({{both}}, false) == (Sets{cpus, cpus}));
}

void check_refusals() {
  const auto refused = [](const Topology& topology) {
    try {
      ThreadPool pool(1, topology);
    } catch (const Status& status) {
      return status.name == "bad-argument";
    }
    return false;
  };
  CHECK(refused(faked(0)));
  CHECK(refused(faked(kMaxNodes + 1)));
  CHECK(refused({{Node{-1, {-1}}}}));
  CHECK(refused({{Node{-1, {1 << 20}}}}));
  ThreadPool pool(2, faked(2));
  for (const std::vector<int64_t>& division :
       {std::vector<int64_t>{0}, {0, 1, 2}, {1, 2}, {0, 5}, {0, -1}}) {
    Job job;
    Phase phase{[] { return int64_t{4}; }, [](int64_t, int) {}};
    phase.node_begin = &division;
    job.phases.push_back(phase);
    bool caught = false;
    try {
      pool.run(Priority::kDecode, job);
    } catch (const Status& status) {
      caught = status.name == "bad-argument";
    }
    CHECK(caught);
  }
}

}  // namespace

void test_nodes() {
  for (const int num_threads : {1, 2, 3, 8})
    for (const int num_nodes : {1, 2, 3, kMaxNodes}) check_every_task_once(num_threads, num_nodes);
  check_words_without_tasks();
  check_own_node_first();
  check_others_help();
  check_binding();
  check_refusals();
}
