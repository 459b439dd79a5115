// What this CPU and operating system can execute (cpuid, and the register state XCR0 saves).
#pragma once
#include <string>
#include <vector>

namespace moechat {

struct CpuFeatures {
  bool avx2_fma_f16c = false;
  bool avx512 = false;       // F, BW, DQ, VL, and the OS saves zmm and mask registers
  bool avx512_bf16 = false;  // BF16 and VBMI, beside avx512
  bool amx_bf16 = false;     // AMX tiles and BF16, beside avx512_bf16; this process may use them
};

const CpuFeatures& cpu_features();
// CPUs this process may use: affinity, cut to the cgroup's CPU quota (rounded up), at least 1.
int available_cpus();

}  // namespace moechat
