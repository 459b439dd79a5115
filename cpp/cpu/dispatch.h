// One table of instruction sets, best first; chosen once at start, forcible for tests.
#pragma once
#include <string>
#include <vector>

#include "kernels/kv_codec/kv_codec.h"
#include "kernels/matmul/matmul.h"
#include "kernels/vector/vector_ops.h"

namespace moechat {

struct InstructionSet {
  const char* name;  // "ref", "avx2", "avx512", "avx512bf16", "amx"
  const MatmulKernels* matmul;
  const VectorKernels* vector;
  const KVCodecKernels* kv_codec;
  int64_t (*dot_peak)(int64_t iterations);  // kernels/peak/peak.h
};

// Instruction sets that run here, best first. "ref" is always last.
std::vector<std::string> supported_instruction_sets();
// The one in use: the best, until force_instruction_set names another.
const InstructionSet& active_instruction_set();
// Throws Status "isa-unsupported" when `name` is unknown or does not run here.
// Must not be called while a job runs.
void force_instruction_set(const std::string& name);

}  // namespace moechat
