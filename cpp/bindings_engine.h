// Checks that the bindings of steps, prefill and generations share; each throws Status "bad-argument".
#pragma once
#include "bindings.h"
#include "kv/cache.h"

namespace moechat {

void check_tokens(const Model& model, const int32_t* tokens, int64_t count);

// The cache must have the model's layers, windows and compute type.
void check_cache(const Model& model, const KVCache& cache);

// Every layer must be complete up to `position`, and hold nothing from there on.
void check_holds(const KVCache& cache, int64_t position);

}  // namespace moechat
