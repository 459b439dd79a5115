// Serves the routed experts of decode steps that run on a GPU: the GPU posts a request at every MoE
// layer, a thread of the pool polls for it and all compute it. Shared experts are the GPU's.
//
// A client posts the MoE layers of a model in order, again and again; request s of a mailbox that
// was reset at 0 is of the MoE layer number (s - 1) % num_moe_layers. Several mailboxes serve
// several steps at once: while the GPU is at one, the CPU is at another.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/threads.h"
#include "decode/mailbox.h"
#include "kernels/experts/experts.h"
#include "model/model.h"

namespace moechat {

// Why serve() returned.
enum class ServeEnd : uint8_t {
  kStep,       // a mailbox is through all MoE layers of a step
  kRequests,   // max_requests were answered
  kInterrupt,  // the flag was raised; the request at hand, if any, is as if it had not been begun
  kTimeout,    // no request came for so long
  kAborted,    // all mailboxes are aborted
};

struct Served {
  ServeEnd end;
  int64_t mailbox = -1;  // of kStep
};

struct ServeTimes {
  double experts_seconds = 0;  // from a request seen until it was answered
  double waiting_seconds = 0;  // in serve(), for requests
  int64_t num_requests = 0;
};

class ExpertServer {
 public:
  // Resets the mailboxes. Throws Status "bad-argument" when there is none or no MoE layer.
  ExpertServer(const Model& model, ThreadPool& pool, const std::vector<Mailbox>& mailboxes);

  // Answers requests, the oldest first. A request that makes no sense aborts its mailbox and throws
  // Status "mailbox-refused"; what the experts throw aborts it as well. Then as after give_up(), the
  // mailbox is left alone until it is reset. One thread at a time, or Status "bad-argument".
  Served serve(const CancelFlag& interrupt, double timeout_seconds, int64_t max_requests);
  // The client of a mailbox waits no longer. From any thread.
  void give_up(int64_t mailbox) { boxes_[static_cast<size_t>(mailbox)].memory.set_abort(); }
  bool aborted(int64_t mailbox) const {
    return boxes_[static_cast<size_t>(mailbox)].memory.aborted();
  }
  // The mailbox is as new: its next request is number sequence + 1, of the first MoE layer. Its
  // client must not be at work, nor serve().
  void reset(int64_t mailbox, uint32_t sequence);
  // Experts of MoE layer number `moe_layer` that the GPU computes itself: left out of y from now
  // on. Ids below num_experts. Not beside serve().
  void set_gpu_experts(int64_t moe_layer, const std::vector<int32_t>& ids);

  int64_t num_mailboxes() const { return static_cast<int64_t>(boxes_.size()); }
  int64_t num_moe_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t num_experts() const { return model_.dims.num_experts; }
  const ServeTimes& times() const { return times_; }

 private:
  struct Box {
    Mailbox memory;
    uint32_t answered = 0;   // as the request that was answered last
    size_t layer = 0;        // MoE layer number of the next request
    uint64_t seen = 0;       // when its request was seen, by count; 0: there is none
  };
  class Turn;  // marks the server as in use, or throws

  Box* find_oldest();
  ServeEnd wait(const CancelFlag& interrupt, double spin_seconds, double timeout_seconds);
  void take_request();
  void open_request(Box& box);
  void reply();
  void check_request(const Box& box) const;
  [[noreturn]] void refuse(const Box& box, const char* why) const;

  const Model& model_;
  ThreadPool& pool_;
  Experts experts_;
  ExpertsCall call_;
  Job job_;
  std::vector<const LayerWeights*> layers_;           // the MoE layers
  std::vector<std::vector<uint8_t>> on_gpu_;          // [MoE layer][expert]; empty: none
  std::vector<Box> boxes_;
  // Of the job: whose request it answers, since when, and whether it is to take no more.
  Box* box_ = nullptr;
  std::chrono::steady_clock::time_point seen_;
  bool stop_ = false;
  int64_t requests_left_ = 0;     // 0: no limit
  std::optional<Served> served_;  // what serve() will say
  std::vector<int32_t> ids_;                          // of the request, out of the client's reach
  std::vector<float> weights_;
  uint64_t num_seen_ = 0;
  ServeTimes times_;
  std::atomic<bool> in_use_{false};
};

}  // namespace moechat
