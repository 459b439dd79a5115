// From a format at run time to code that is compiled for it: the one place that lists them all.
#pragma once
#include <type_traits>

#include "common/matrix_view.h"

namespace moechat {

template <Format kFormat>
using FormatConstant = std::integral_constant<Format, kFormat>;

// function(FormatConstant<format>{}); always inlined, so that code compiled for one instruction set
// never leaks into another.
template <typename Function>
[[gnu::always_inline]] inline void for_format(Format format, const Function& function) {
  switch (format) {
    case Format::kF32: return function(FormatConstant<Format::kF32>{});
    case Format::kF16: return function(FormatConstant<Format::kF16>{});
    case Format::kBF16: return function(FormatConstant<Format::kBF16>{});
    case Format::kFP8: return function(FormatConstant<Format::kFP8>{});
    case Format::kMXFP4: return function(FormatConstant<Format::kMXFP4>{});
    case Format::kInt4: return function(FormatConstant<Format::kInt4>{});
    case Format::kAWQ: return function(FormatConstant<Format::kAWQ>{});
    case Format::kGPTQ: return function(FormatConstant<Format::kGPTQ>{});
    case Format::kQ8_0: return function(FormatConstant<Format::kQ8_0>{});
    case Format::kQ4_0: return function(FormatConstant<Format::kQ4_0>{});
    case Format::kQ5_0: return function(FormatConstant<Format::kQ5_0>{});
    case Format::kQ4_K: return function(FormatConstant<Format::kQ4_K>{});
    case Format::kQ5_K: return function(FormatConstant<Format::kQ5_K>{});
    case Format::kQ6_K: return function(FormatConstant<Format::kQ6_K>{});
    case Format::kMXFP4Block: return function(FormatConstant<Format::kMXFP4Block>{});
  }
}

}  // namespace moechat
