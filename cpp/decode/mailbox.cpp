#include "decode/mailbox.h"

#include <string>

#include "common/status.h"
#include "kernels/matmul/matmul.h"

namespace moechat {
namespace {

constexpr int64_t kMaxHidden = int64_t{1} << 24;
constexpr int64_t kMaxExpertsPerToken = int64_t{1} << 16;

int64_t up_to_a_line(int64_t bytes) {
  return (bytes + kMailboxLine - 1) / kMailboxLine * kMailboxLine;
}

}  // namespace

MailboxLayout mailbox_layout(int64_t max_rows, int64_t hidden, int64_t experts_per_token) {
  // No more rows than decode-class kernels take, whose bits do not depend on the other rows.
  if (max_rows < 1 || max_rows > kMaxGemvRows || hidden < 1 || hidden > kMaxHidden ||
      experts_per_token < 1 || experts_per_token > kMaxExpertsPerToken)
    throw Status("bad-argument", "a mailbox has 1 to " + std::to_string(kMaxGemvRows) +
                                     " rows of at least one element and one expert");
  MailboxLayout layout;
  layout.x = layout.rows + kMailboxLine;
  layout.ids = layout.x + up_to_a_line(max_rows * hidden * 4);
  layout.weights = layout.ids + up_to_a_line(max_rows * experts_per_token * 4);
  layout.y = layout.weights + up_to_a_line(max_rows * experts_per_token * 4);
  layout.total = layout.y + up_to_a_line(max_rows * hidden * 4);
  layout.max_rows = max_rows;
  return layout;
}

Mailbox::Mailbox(uint8_t* memory, int64_t size_bytes, const MailboxLayout& layout)
    : memory_(memory), layout_(layout) {
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % kMailboxLine != 0)
    throw Status("bad-argument", "a mailbox begins at a multiple of 64 bytes");
  if (size_bytes < layout.total)
    throw Status("bad-argument", "a mailbox of " + std::to_string(size_bytes) +
                                     " bytes, where " + std::to_string(layout.total) +
                                     " are needed");
}

void Mailbox::reset(uint32_t sequence) {
  store(layout_.request, sequence);
  store(layout_.reply, sequence);
  store(layout_.rows, 0);
  store(layout_.abort, 0);
}

}  // namespace moechat
