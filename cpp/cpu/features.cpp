#include "cpu/features.h"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace moechat {
namespace {

// XCR0: which register files the operating system saves on a context switch.
uint64_t saved_register_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives a process the 8 KiB of tile registers on request only (5.16 and later); its threads
// and children then have them, too.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures detect() {
  CpuFeatures features;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool os_xsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
  if (!os_xsave) return features;
  const uint64_t saved = saved_register_state();
  const bool saves_ymm = (saved & 0x6) == 0x6, saves_zmm = (saved & 0xe6) == 0xe6;
  const bool saves_tiles = (saved >> 17 & 3) == 3;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2_fma_f16c = saves_ymm && fma && f16c && (b >> 5 & 1);
  features.avx512 = saves_zmm && features.avx2_fma_f16c && (b >> 16 & 1) && (b >> 17 & 1) &&
                    (b >> 30 & 1) && (b >> 31 & 1);
  const bool vbmi = (c >> 1 & 1) && (c >> 11 & 1);  // and VNNI
  const bool amx = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
  unsigned max_subleaf = a;
  bool bf16 = false;
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) bf16 = a >> 5 & 1;
  features.avx512_bf16 = features.avx512 && vbmi && bf16;
  features.amx_bf16 = features.avx512_bf16 && amx && saves_tiles && may_use_tiles();
  return features;
}

// CPUs' worth of time that the cgroup grants, or a large number. Reads cgroup v2, then v1.
int cgroup_cpus() {
  constexpr int kUnlimited = 1 << 20;
  long long quota = -1, period = -1;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(file, "%lld %lld", &quota, &period) != 2) quota = -1;
    std::fclose(file);
  } else if (FILE* quota_file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r")) {
    if (std::fscanf(quota_file, "%lld", &quota) != 1) quota = -1;
    std::fclose(quota_file);
    if (FILE* period_file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r")) {
      if (std::fscanf(period_file, "%lld", &period) != 1) period = -1;
      std::fclose(period_file);
    }
  }
  if (quota <= 0 || period <= 0) return kUnlimited;
  return static_cast<int>(std::min<long long>((quota + period - 1) / period, kUnlimited));
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int affinity = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1, std::min(affinity, cgroup_cpus()));
}

}  // namespace moechat
