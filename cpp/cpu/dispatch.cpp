#include "cpu/dispatch.h"

#include <atomic>
#include <iterator>

#include "common/status.h"
#include "cpu/features.h"
#include "kernels/peak/peak.h"

namespace moechat {
namespace {

struct Entry {
  InstructionSet set;
  bool (*runs_here)(const CpuFeatures&);
};

const Entry kTable[] = {
    {{"amx", &kMatmulAmx, &kVectorAvx512, &kKVCodecAvx512, &dot_peak_amx},
     [](const CpuFeatures& f) { return f.amx_bf16; }},
    {{"avx512bf16", &kMatmulAvx512bf16, &kVectorAvx512, &kKVCodecAvx512, &dot_peak_avx512bf16},
     [](const CpuFeatures& f) { return f.avx512_bf16; }},
    {{"avx512", &kMatmulAvx512, &kVectorAvx512, &kKVCodecAvx512, &dot_peak_avx512},
     [](const CpuFeatures& f) { return f.avx512; }},
    {{"avx2", &kMatmulAvx2, &kVectorAvx2, &kKVCodecAvx2, &dot_peak_avx2},
     [](const CpuFeatures& f) { return f.avx2_fma_f16c; }},
    {{"ref", &kMatmulRef, &kVectorRef, &kKVCodecRef, &dot_peak_ref}, [](const CpuFeatures&) { return true; }},
};

std::atomic<const InstructionSet*> active{nullptr};

}  // namespace

std::vector<std::string> supported_instruction_sets() {
  std::vector<std::string> names;
  for (const Entry& entry : kTable)
    if (entry.runs_here(cpu_features())) names.emplace_back(entry.set.name);
  return names;
}

const InstructionSet& active_instruction_set() {
  const InstructionSet* set = active.load(std::memory_order_acquire);
  if (set != nullptr) return *set;
  for (const Entry& entry : kTable)
    if (entry.runs_here(cpu_features())) {
      active.store(&entry.set, std::memory_order_release);
      return entry.set;
    }
  return std::end(kTable)[-1].set;
}

void force_instruction_set(const std::string& name) {
  for (const Entry& entry : kTable)
    if (name == entry.set.name && entry.runs_here(cpu_features())) {
      active.store(&entry.set, std::memory_order_release);
      return;
    }
  std::string known;
  for (const std::string& supported : supported_instruction_sets())
    known += (known.empty() ? "" : ", ") + supported;
  throw Status("isa-unsupported", "instruction set '" + name + "' does not run here; choose one of " + known);
}

}  // namespace moechat
