// The native test program: built with MOECHAT_SANITIZE; exits 1 when any check fails.
#include "check.h"

void test_sampler();
void test_matmul();
void test_threads();
void test_hot_path();
void test_nodes();
void test_compact_copy();
void test_kv_codec();
void test_expert_server();

int main() {
  test_sampler();
  test_matmul();
  test_threads();
  test_nodes();
  test_compact_copy();
  test_kv_codec();
  test_expert_server();
  test_hot_path();
  std::printf("native tests: %d failures\n", moechat_test::failures);
  return moechat_test::failures == 0 ? 0 : 1;
}
