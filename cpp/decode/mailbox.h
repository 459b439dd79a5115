// Host memory in which a GPU leaves the routed experts' inputs of one layer and finds their sums.
//
// Four 32-bit words, each in a line of 64 bytes of its own, and four arrays; all little-endian. The
// client writes x, ids, weights and rows, then `request` = s (release); the server answers with y,
// then `reply` = s (release). s counts the requests, modulo 2^32. Once `abort` is not 0 no reply
// will come. The memory is the caller's, and the client is not trusted with anything but values.
#pragma once
#include <cstdint>

namespace moechat {

constexpr int64_t kMailboxLine = 64;

// Byte offsets of the words and arrays. Rows of a request are 1..max_rows, densely packed.
struct MailboxLayout {
  int64_t request = 0, reply = kMailboxLine, abort = 2 * kMailboxLine, rows = 3 * kMailboxLine;
  int64_t x = 0;        // float32 [max_rows][hidden], normalised inputs
  int64_t ids = 0;      // int32 [max_rows][experts_per_token], distinct in a row
  int64_t weights = 0;  // float32 [max_rows][experts_per_token]
  int64_t y = 0;        // float32 [max_rows][hidden], the weighted sums
  int64_t total = 0;    // bytes of all
  int64_t max_rows = 0;
};

// Arrays begin at lines. Throws Status "bad-argument" on sizes that make no sense.
MailboxLayout mailbox_layout(int64_t max_rows, int64_t hidden, int64_t experts_per_token);

// One mailbox, as the server sees it.
class Mailbox {
 public:
  // Throws Status "bad-argument" unless the memory is whole and begins at a line.
  Mailbox(uint8_t* memory, int64_t size_bytes, const MailboxLayout& layout);

  // Words are read and written with acquire and release order.
  uint32_t request() const { return load(layout_.request); }
  uint32_t reply() const { return load(layout_.reply); }
  bool aborted() const { return load(layout_.abort) != 0; }
  int32_t rows() const { return static_cast<int32_t>(load(layout_.rows)); }
  int64_t max_rows() const { return layout_.max_rows; }
  void set_reply(uint32_t sequence) { store(layout_.reply, sequence); }
  void set_abort() { store(layout_.abort, 1); }
  // As if `sequence` requests had been answered. The client must not be at work.
  void reset(uint32_t sequence);

  const float* x() const { return reinterpret_cast<const float*>(memory_ + layout_.x); }
  const int32_t* ids() const { return reinterpret_cast<const int32_t*>(memory_ + layout_.ids); }
  const float* weights() const {
    return reinterpret_cast<const float*>(memory_ + layout_.weights);
  }
  float* y() { return reinterpret_cast<float*>(memory_ + layout_.y); }

 private:
  uint32_t load(int64_t offset) const {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(memory_ + offset), __ATOMIC_ACQUIRE);
  }
  void store(int64_t offset, uint32_t value) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(memory_ + offset), value, __ATOMIC_RELEASE);
  }

  uint8_t* memory_;
  MailboxLayout layout_;
};

}  // namespace moechat
