// The expert server and its mailboxes: threads play GPUs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/status.h"
#include "cpu/dispatch.h"
#include "cpu/threads.h"
#include "decode/expert_server.h"
#include "model/resident.h"
#include "random_model.h"

namespace {

using namespace moechat;
using namespace moechat_test;
using namespace std::chrono_literals;

constexpr int64_t kRows = 4;
constexpr double kLimitSeconds = 20;

struct alignas(kMailboxLine) Line {
  uint8_t bytes[kMailboxLine];
};

// One mailbox's memory, and what kernels do with it.
class Client {
 public:
  explicit Client(const ModelDims& d)
      : dims_(d),
        layout_(mailbox_layout(kRows, d.hidden, d.experts_per_token)),
        lines_(static_cast<size_t>(layout_.total / kMailboxLine)) {}

  Mailbox mailbox() { return {bytes(), layout_.total, layout_}; }
  template <typename T>
  T* at(int64_t offset) {
    return reinterpret_cast<T*>(bytes() + offset);
  }
  const MailboxLayout& layout() const { return layout_; }

  // Inputs that are the sequence's own.
  void fill(uint32_t sequence, int64_t rows) {
    for (int64_t i = 0; i < rows * dims_.hidden; ++i)
      at<float>(layout_.x)[i] = 0.01f * static_cast<float>((sequence * 31 + i * 7) % 101) - 0.5f;
    for (int64_t i = 0; i < rows * dims_.experts_per_token; ++i) {
      const int64_t row = i / dims_.experts_per_token, k = i % dims_.experts_per_token;
      at<int32_t>(layout_.ids)[i] = static_cast<int32_t>((sequence + row + 3 * k) % 8);
      at<float>(layout_.weights)[i] = 0.25f + 0.1f * static_cast<float>(k);
    }
    *at<int32_t>(layout_.rows) = static_cast<int32_t>(rows);
  }
  void post(uint32_t sequence) {
    __atomic_store_n(at<uint32_t>(layout_.request), sequence, __ATOMIC_RELEASE);
  }
  // False when the server has given up.
  bool wait(uint32_t sequence) {
    while (__atomic_load_n(at<uint32_t>(layout_.reply), __ATOMIC_ACQUIRE) != sequence) {
      if (__atomic_load_n(at<uint32_t>(layout_.abort), __ATOMIC_ACQUIRE) != 0) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  uint8_t* bytes() { return lines_[0].bytes; }

  ModelDims dims_;
  MailboxLayout layout_;
  std::vector<Line> lines_;
};

// The experts' sums of the inputs that a client holds, asked directly. `without`: left out.
std::vector<float> expected(const Model& model, ThreadPool& pool, Client& client, int64_t layer,
                            int64_t rows, int32_t without = -2) {
  const ModelDims& d = model.dims;
  std::vector<float> y(static_cast<size_t>(rows * d.hidden), NAN);
  std::vector<int32_t> ids(client.at<int32_t>(client.layout().ids),
                           client.at<int32_t>(client.layout().ids) + rows * d.experts_per_token);
  for (int32_t& id : ids)
    if (id == without) id = kNoExpert;
  Experts experts(active_instruction_set(), pool);
  ExpertsCall call;
  call.dims = &d;
  call.layer = &model.layers[static_cast<size_t>(layer)];
  call.with_shared = false;
  call.num_rows = rows;
  call.experts_per_token = d.experts_per_token;
  call.x = client.at<float>(client.layout().x);
  call.ids = ids.data();
  call.weights = client.at<float>(client.layout().weights);
  call.y = y.data();
  Job job;
  experts.add_phases(job, &call);
  pool.run(Priority::kDecode, job);
  return y;
}

bool equals(Client& client, const std::vector<float>& y) {
  return std::memcmp(client.at<float>(client.layout().y), y.data(), y.size() * sizeof(float)) == 0;
}

// Several clients at once; every reply has the bits of a direct call.
void check_clients(const Model& model, int num_threads, size_t num_nodes, int num_clients) {
  ThreadPool pool(num_threads, {std::vector<Node>(num_nodes)});
  ThreadPool own(1, {std::vector<Node>(num_nodes)});
  std::vector<Client> clients;
  std::vector<Mailbox> mailboxes;
  for (int c = 0; c < num_clients; ++c) clients.emplace_back(model.dims);
  for (Client& client : clients) mailboxes.push_back(client.mailbox());
  ExpertServer server(model, pool, mailboxes);
  const auto layers = static_cast<uint32_t>(server.num_moe_layers());
  constexpr uint32_t kSteps = 20;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  std::mutex direct;  // of the pool that says what is right
  for (int c = 0; c < num_clients; ++c)
    threads.emplace_back([&, c] {
      Client& client = clients[static_cast<size_t>(c)];
      for (uint32_t s = 1; s <= kSteps * layers; ++s) {
        const int64_t rows = 1 + (s + c) % kRows;
        client.fill(s + 100 * c, rows);
        client.post(s);
        if (!client.wait(s)) ++wrong;
        const std::lock_guard<std::mutex> lock(direct);
        if (!equals(client, expected(model, own, client, (s - 1) % layers, rows))) ++wrong;
      }
    });
  const CancelFlag never;
  std::vector<int> steps(clients.size());
  for (uint32_t i = 0; i < kSteps * clients.size(); ++i) {
    const Served served = server.serve(never, kLimitSeconds, 0);
    CHECK(served.end == ServeEnd::kStep);
    if (served.mailbox >= 0) ++steps[static_cast<size_t>(served.mailbox)];
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  for (const int count : steps) CHECK(count == kSteps);
  CHECK(server.times().num_requests == static_cast<int64_t>(kSteps * layers * clients.size()));
}

// An expert on the GPU is left out, whether its sums are joined with others' or of several parts.
void check_mask(const Model& model, size_t num_nodes) {
  ThreadPool pool(2, {std::vector<Node>(num_nodes)});
  Client client(model.dims);
  ExpertServer server(model, pool, {client.mailbox()});
  const CancelFlag never;
  client.fill(5, kRows);
  const std::vector<float> whole = expected(model, pool, client, 0, kRows);
  const int32_t masked = client.at<int32_t>(client.layout().ids)[1];
  server.set_gpu_experts(0, {masked});
  client.post(1);
  CHECK(server.serve(never, kLimitSeconds, 1).end == ServeEnd::kRequests);
  const std::vector<float> rest = expected(model, pool, client, 0, kRows, masked);
  CHECK(equals(client, rest));
  CHECK(std::memcmp(whole.data(), rest.data(), rest.size() * sizeof(float)) != 0);
  // The other experts of a row, one by one, sum up to what is left.
  double difference = 0, largest = 0;
  for (int64_t i = 0; i < kRows * model.dims.experts_per_token; ++i) {
    float* weight = client.at<float>(client.layout().weights) + i;
    if (client.at<int32_t>(client.layout().ids)[i] == masked) *weight = 0;
  }
  const std::vector<float> zeroed = expected(model, pool, client, 0, kRows);
  for (size_t i = 0; i < rest.size(); ++i) {
    difference = std::max<double>(difference, std::abs(zeroed[i] - rest[i]));
    largest = std::max<double>(largest, std::abs(rest[i]));
  }
  CHECK(largest > 0 && difference <= 1e-6 * largest);
  server.set_gpu_experts(1, {0, 1, 2, 3, 4, 5, 6, 7});
  client.post(2);
  CHECK(server.serve(never, kLimitSeconds, 0).end == ServeEnd::kStep);
  CHECK(equals(client, std::vector<float>(rest.size(), 0.0f)));
}

// A client that dies, one that writes garbage, and a server that is told to stop meanwhile.
void check_ends(const Model& model) {
  ThreadPool pool(2);
  Client client(model.dims), garbage(model.dims);
  ExpertServer server(model, pool, {client.mailbox(), garbage.mailbox()});
  const CancelFlag never;
  CHECK(server.serve(never, 0.01, 0).end == ServeEnd::kTimeout);
  CancelFlag flag;
  std::thread raiser([&flag] {
    std::this_thread::sleep_for(2ms);
    flag.raise();
  });
  CHECK(server.serve(flag, kLimitSeconds, 0).end == ServeEnd::kInterrupt);
  raiser.join();
  garbage.fill(1, 2);
  garbage.at<int32_t>(garbage.layout().ids)[0] = std::numeric_limits<int32_t>::min();
  garbage.post(1);
  std::string name;
  try {
    server.serve(never, kLimitSeconds, 0);
  } catch (const Status& status) {
    name = status.name;
  }
  CHECK(name == "mailbox-refused" && server.aborted(1) && !server.aborted(0));
  CHECK(!garbage.wait(1));
  std::thread waiting([&client] {
    client.fill(1, 1);
    client.post(2);  // nobody will answer: it is not the next one, and looked at by nobody
    CHECK(!client.wait(2));
  });
  server.give_up(0);
  waiting.join();
  CHECK(server.serve(never, kLimitSeconds, 0).end == ServeEnd::kAborted);
  server.reset(0, 7);
  client.fill(8, 1);
  client.post(8);
  CHECK(server.serve(never, kLimitSeconds, 1).end == ServeEnd::kRequests);
  CHECK(client.wait(8) && equals(client, expected(model, pool, client, 0, 1)));
}

// Given up by another thread in the middle of requests: the client always comes back.
void check_given_up_at_any_time(const Model& model) {
  ThreadPool pool(2);
  Client client(model.dims);
  ExpertServer server(model, pool, {client.mailbox()});
  const CancelFlag never;
  for (int round = 0; round < 50; ++round) {
    server.reset(0, 0);
    std::thread gpu([&client] {
      for (uint32_t s = 1;; ++s) {
        client.fill(s, 1);
        client.post(s);
        if (!client.wait(s)) return;
      }
    });
    std::thread stopper([&server, round] {
      std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
      server.give_up(0);
    });
    while (server.serve(never, kLimitSeconds, 0).end == ServeEnd::kStep) {
    }
    gpu.join();
    stopper.join();
    CHECK(server.aborted(0));
  }
}

// Given up after its first request was seen and before a worker takes it: there is nothing to do.
void check_given_up_before_it_is_taken(const Model& model) {
  ThreadPool pool(2);
  Client client(model.dims);
  ExpertServer server(model, pool, {client.mailbox()});
  CancelFlag stop;
  std::atomic<bool> busy{false}, go{false};
  std::thread other([&] {  // has the pool meanwhile
    Job job;
    job.phases.push_back({[&]() -> int64_t {
                            busy.store(true);
                            while (!go.load()) std::this_thread::yield();
                            return 0;
                          },
                          nullptr});
    pool.run(Priority::kDecode, job);
  });
  while (!busy.load()) std::this_thread::yield();
  client.fill(1, 1);
  client.post(1);
  std::thread gives_up([&] {
    std::this_thread::sleep_for(20ms);  // serve() waits for its turn at the pool
    server.give_up(0);
    go.store(true);
  });
  CHECK(server.serve(stop, kLimitSeconds, 0).end == ServeEnd::kAborted);
  gives_up.join();
  other.join();
  CHECK(server.times().num_requests == 0);
}

}  // namespace

void test_expert_server() {
  Values values;
  Model model = make_model(values, false);
  for (const int num_threads : {1, 3})
    for (const int num_clients : {1, 2}) check_clients(model, num_threads, 1, num_clients);
  check_mask(model, 1);
  check_ends(model);
  check_given_up_before_it_is_taken(model);
  check_given_up_at_any_time(model);
  ThreadPool pool(2, {std::vector<Node>(2)});
  ResidentWeights resident(model, pool);
  while (resident.fill(10000) > 0) {
  }
  resident.install();
  check_clients(model, 2, 2, 2);
  check_mask(model, 2);
}
