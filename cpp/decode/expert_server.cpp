#include "decode/expert_server.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "common/status.h"
#include "cpu/dispatch.h"

namespace moechat {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSpinSeconds = 200e-6;
constexpr auto kNap = std::chrono::microseconds(50);  // between two looks, after that
constexpr int kPausesPerClockRead = 16;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

class ExpertServer::Turn {
 public:
  explicit Turn(std::atomic<bool>& in_use) : in_use_(in_use) {
    if (in_use_.exchange(true)) throw Status("bad-argument", "the expert server is in use");
  }
  ~Turn() { in_use_.store(false); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& in_use_;
};

ExpertServer::ExpertServer(const Model& model, ThreadPool& pool,
                           const std::vector<Mailbox>& mailboxes)
    : model_(model), pool_(pool), experts_(active_instruction_set(), pool) {
  for (const LayerWeights& layer : model.layers)
    if (layer.is_moe) layers_.push_back(&layer);
  if (layers_.empty()) throw Status("bad-argument", "the model has no routed experts");
  if (mailboxes.empty()) throw Status("bad-argument", "an expert server needs a mailbox");
  on_gpu_.resize(layers_.size());
  for (const Mailbox& mailbox : mailboxes) boxes_.push_back({mailbox});
  for (int64_t box = 0; box < num_mailboxes(); ++box) reset(box, 0);
  call_.dims = &model.dims;
  call_.compute = model.compute;
  call_.with_shared = false;
  call_.experts_per_token = model.dims.experts_per_token;
  experts_.add_phases(job_, &call_);
  // The worker that ends the last task replies: the client need not wait until this thread wakes.
  job_.phases.push_back({[this]() -> int64_t {
                           Box& box = *answered_box_;
                           box.memory.set_reply(++box.answered);
                           return 0;
                         },
                         nullptr, "experts.reply"});
}

void ExpertServer::reset(int64_t mailbox, uint32_t sequence) {
  const Turn turn(in_use_);
  Box& box = boxes_[static_cast<size_t>(mailbox)];
  box.answered = sequence;
  box.layer = 0;
  box.seen = 0;
  box.memory.reset(sequence);
}

void ExpertServer::set_gpu_experts(int64_t moe_layer, const std::vector<int32_t>& ids) {
  const Turn turn(in_use_);
  std::vector<uint8_t>& on_gpu = on_gpu_[static_cast<size_t>(moe_layer)];
  on_gpu.assign(ids.empty() ? 0 : static_cast<size_t>(num_experts()), 0);
  for (const int32_t id : ids) on_gpu[static_cast<size_t>(id)] = 1;
}

Served ExpertServer::serve(const CancelFlag& interrupt, double timeout_seconds,
                           int64_t max_requests) {
  const Turn turn(in_use_);
  for (int64_t count = 1;; ++count) {
    size_t oldest = 0;
    const Clock::time_point began = Clock::now();
    const ServeEnd waited = wait(interrupt, timeout_seconds, &oldest);
    const Clock::time_point seen = Clock::now();
    times_.waiting_seconds += std::chrono::duration<double>(seen - began).count();
    if (waited != ServeEnd::kRequests) return {waited};
    Box& box = boxes_[oldest];
    bool complete = false;
    try {
      complete = answer(box, interrupt);
    } catch (...) {
      box.memory.set_abort();
      throw;
    }
    times_.experts_seconds += seconds_since(seen);
    if (!complete) return {ServeEnd::kInterrupt};
    ++times_.num_requests;
    if (box.layer == 0) return {ServeEnd::kStep, static_cast<int64_t>(oldest)};
    if (count == max_requests) return {ServeEnd::kRequests};
  }
}

// Looks at all mailboxes once. False when there is no request.
bool ExpertServer::find_oldest(size_t* oldest) {
  bool found = false;
  for (size_t i = 0; i < boxes_.size(); ++i) {
    Box& box = boxes_[i];
    if (box.memory.request() == box.answered || box.memory.aborted()) continue;
    if (box.seen == 0) box.seen = ++num_seen_;
    if (!found || box.seen < boxes_[*oldest].seen) *oldest = i;
    found = true;
  }
  return found;
}

// kRequests when there is one.
ServeEnd ExpertServer::wait(const CancelFlag& interrupt, double timeout_seconds, size_t* oldest) {
  const Clock::time_point began = Clock::now();
  double waited_seconds = 0;
  while (true) {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (interrupt.raised()) return ServeEnd::kInterrupt;
      if (find_oldest(oldest)) return ServeEnd::kRequests;
      __builtin_ia32_pause();
    }
    if (std::all_of(boxes_.begin(), boxes_.end(),
                    [](const Box& box) { return box.memory.aborted(); }))
      return ServeEnd::kAborted;
    if (waited_seconds >= timeout_seconds) return ServeEnd::kTimeout;
    if (waited_seconds > kSpinSeconds) std::this_thread::sleep_for(kNap);
    waited_seconds = seconds_since(began);
  }
}

void ExpertServer::refuse(const Box& box, const char* why) const {
  throw Status("mailbox-refused", "mailbox " + std::to_string(&box - boxes_.data()) +
                                      ", request " + std::to_string(box.memory.request()) + ": " +
                                      why);
}

// The request, as it was copied.
void ExpertServer::check_request(const Box& box) const {
  const int64_t k = call_.experts_per_token;
  const auto count = static_cast<int64_t>(ids_.size());
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = ids_[static_cast<size_t>(i)];
    if (id < 0 || id >= num_experts()) refuse(box, "an expert id is out of range");
    for (int64_t j = i / k * k; j < i; ++j)
      if (ids_[static_cast<size_t>(j)] == id) refuse(box, "an expert stands twice in a row");
  }
}

// False when the flag cut it short.
bool ExpertServer::answer(Box& box, const CancelFlag& interrupt) {
  if (box.memory.request() != box.answered + 1) refuse(box, "it is not the next one");
  const int32_t rows = box.memory.rows();  // once: the client may still write
  if (rows < 1 || rows > box.memory.max_rows()) refuse(box, "the number of rows is out of range");
  const int64_t count = rows * call_.experts_per_token;
  ids_.assign(box.memory.ids(), box.memory.ids() + count);
  weights_.assign(box.memory.weights(), box.memory.weights() + count);
  check_request(box);
  const std::vector<uint8_t>& on_gpu = on_gpu_[box.layer];
  if (!on_gpu.empty())
    for (int32_t& id : ids_)
      if (on_gpu[static_cast<size_t>(id)] != 0) id = kNoExpert;
  call_.layer = layers_[box.layer];
  call_.num_rows = rows;
  call_.x = box.memory.x();
  call_.ids = ids_.data();
  call_.weights = weights_.data();
  call_.y = box.memory.y();
  answered_box_ = &box;
  job_.cancel = &interrupt;
  if (!pool_.run(Priority::kDecode, job_)) return false;
  box.seen = 0;
  box.layer = (box.layer + 1) % layers_.size();
  return true;
}

}  // namespace moechat
