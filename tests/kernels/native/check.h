// The smallest check macro: counts and prints failures, and goes on.
#pragma once
#include <cstdio>

namespace moechat_test {

// Failures so far, in all test files.
inline int failures = 0;

}  // namespace moechat_test

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      ++moechat_test::failures;                                            \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                      \
  } while (false)
