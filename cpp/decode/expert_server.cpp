#include "decode/expert_server.h"

#include <algorithm>
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
constexpr int kRequestsPerJob = 16;

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
  call_.layer = layers_.front();  // also of phases that have no request
  call_.compute = model.compute;
  call_.with_shared = false;
  call_.experts_per_token = model.dims.experts_per_token;
  // One job answers many requests: the worker that ends a phase replies, and looks for the next
  // request, so that neither waits until this thread wakes.
  for (int i = 0; i < kRequestsPerJob; ++i) {
    job_.phases.push_back({[this]() -> int64_t { return take_request(), 0; }, nullptr,
                           "experts.request"});
    experts_.add_phases(job_, &call_);
    job_.phases.push_back({[this]() -> int64_t { return reply(), 0; }, nullptr, "experts.reply"});
  }
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
  requests_left_ = max_requests;
  job_.cancel = &interrupt;
  served_.reset();
  double spin_seconds = kSpinSeconds;
  while (true) {
    const ServeEnd waited = wait(interrupt, spin_seconds, timeout_seconds);
    if (waited != ServeEnd::kRequests) return {waited};
    stop_ = false;
    box_ = nullptr;
    bool complete = false;
    try {
      complete = pool_.run(Priority::kDecode, job_);
    } catch (...) {
      if (box_ != nullptr) box_->memory.set_abort();
      throw;
    }
    if (served_) return *served_;
    if (!complete) return {ServeEnd::kInterrupt};
    spin_seconds = stop_ ? 0 : kSpinSeconds;  // a worker has been spinning
  }
}

// Looks at all mailboxes once: the one whose request is the oldest, or null.
ExpertServer::Box* ExpertServer::find_oldest() {
  Box* oldest = nullptr;
  for (Box& box : boxes_) {
    if (box.memory.request() == box.answered || box.memory.aborted()) continue;
    if (box.seen == 0) box.seen = ++num_seen_;
    if (oldest == nullptr || box.seen < oldest->seen) oldest = &box;
  }
  return oldest;
}

// kRequests when there is one. Sleeps between looks after `spin_seconds`.
ServeEnd ExpertServer::wait(const CancelFlag& interrupt, double spin_seconds,
                            double timeout_seconds) {
  const Clock::time_point began = Clock::now();
  double waited_seconds = 0;
  while (true) {
    std::optional<ServeEnd> end;
    for (int i = 0; i < kPausesPerClockRead && !end; ++i) {
      if (interrupt.raised())
        end = ServeEnd::kInterrupt;
      else if (find_oldest() != nullptr)
        end = ServeEnd::kRequests;
      else
        __builtin_ia32_pause();
    }
    const double before = waited_seconds;
    waited_seconds = seconds_since(began);
    times_.waiting_seconds += waited_seconds - before;
    if (end) return *end;
    if (std::all_of(boxes_.begin(), boxes_.end(),
                    [](const Box& box) { return box.memory.aborted(); }))
      return ServeEnd::kAborted;
    if (waited_seconds >= timeout_seconds) return ServeEnd::kTimeout;
    if (waited_seconds >= spin_seconds) std::this_thread::sleep_for(kNap);
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

// Opens the experts' phases of the next request. When none comes in time, they get no rows.
void ExpertServer::take_request() {
  call_.num_rows = 0;
  box_ = nullptr;
  if (!stop_ && wait(*job_.cancel, kSpinSeconds, kSpinSeconds) == ServeEnd::kRequests)
    box_ = find_oldest();  // null: given up meanwhile
  stop_ = box_ == nullptr;
  if (stop_) return;
  seen_ = Clock::now();
  open_request(*box_);
}

void ExpertServer::open_request(Box& box) {
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
}

void ExpertServer::reply() {
  if (box_ == nullptr) return;
  Box& box = *box_;
  box.memory.set_reply(++box.answered);
  box.seen = 0;
  box.layer = (box.layer + 1) % layers_.size();
  times_.experts_seconds += seconds_since(seen_);
  ++times_.num_requests;
  box_ = nullptr;
  if (box.layer == 0)
    served_ = {ServeEnd::kStep, &box - boxes_.data()};
  else if (--requests_left_ == 0)
    served_ = {ServeEnd::kRequests};
  stop_ = served_.has_value();
}

}  // namespace moechat
