// Weight rows that are fetched into the caches while others are multiplied.
#pragma once
#include <cstdint>

namespace moechat {

struct NextRows {
  const uint8_t* rows;
  int64_t stride_bytes;
};

}  // namespace moechat
