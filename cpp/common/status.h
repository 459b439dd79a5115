// The one exception type of native code. Bindings turn it into moechat.errors by its stable name.
#pragma once
#include <stdexcept>
#include <string>

namespace moechat {

struct Status : std::runtime_error {
  Status(std::string stable_name, const std::string& message)
      : std::runtime_error(message), name(std::move(stable_name)) {}
  std::string name;  // stable lower-case name, e.g. "non-finite-logits"
};

}  // namespace moechat
