// A decode step allocates nothing once it has run: counted by the sanitizer's allocation hook.
#include <atomic>
#include <vector>

#include "check.h"
#include "cpu/threads.h"
#include "decode/step.h"
#include "kv/cache.h"
#include "model/model.h"
#include "model/resident.h"
#include "random_model.h"

// Of the sanitizer's runtime library; its header is not installed everywhere.
extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*allocated)(const volatile void*, size_t), void (*freed)(const volatile void*));

namespace {

using namespace moechat;
using namespace moechat_test;

std::atomic<int64_t> allocations{0};

void count_allocation(const volatile void*, size_t) { ++allocations; }
void ignore_free(const volatile void*) {}

void check_steps(bool latent, size_t num_nodes) {
  Values values;
  Model model = make_model(values, latent);
  const ModelDims& d = model.dims;
  ThreadPool pool(2, {std::vector<Node>(num_nodes)});
  ResidentWeights resident(model, pool);
  if (num_nodes > 1) {
    while (resident.fill(10000) > 0) {
    }
    resident.install();
  }
  DecodeStep step(model, pool);
  KVCache cache(model.windows(), d.kv_segments(), d.kv_width() / d.kv_segments(), model.compute);
  std::vector<float> logits(static_cast<size_t>(d.vocab));
  int32_t token = 1;
  std::vector<StepRow> rows = {{&cache, &token, 1, 0, logits.data()}};
  int64_t counted = 0;
  for (int32_t position = 0; position < 40; ++position) {  // within one page
    rows[0].position = position;
    token = position % 100;
    const int64_t before = allocations;
    CHECK(step.run(rows, nullptr));
    if (position >= 20) counted += allocations - before;
  }
  CHECK(counted == 0);
  if (counted != 0) std::fprintf(stderr, "%lld allocations in 20 steps\n", (long long)counted);
}

}  // namespace

void test_hot_path() {
  __sanitizer_install_malloc_and_free_hooks(count_allocation, ignore_free);
  const int64_t before = allocations;
  std::vector<int>* probe = new std::vector<int>(10);
  CHECK(allocations > before);  // the hook works
  delete probe;
  for (const size_t num_nodes : {1, 2}) {
    check_steps(true, num_nodes);
    check_steps(false, num_nodes);
  }
}
