"""The bench's plain reading against a reading program of its own: see ``compare``.

Run by hand: ``python tests/measure_reading.py [--threads 2] [--gib 2] [--small]``; exit code 1 when
they differ by more than a tenth. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moechat import _native
from moechat.bench.expert_weights import map_read_only
from moechat.bench.reading import Reader

ROUNDS = 9
MAX_DIFFERENCE = 0.1
# One thread a share of an anonymous buffer, 512-bit loads, eight accumulators, no prefetch.
PROGRAM = r"""
#include <immintrin.h>
#include <sys/mman.h>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace {
void* memory = nullptr;
size_t share = 0;
int count = 0;

long long xor_of(const char* begin, const char* end) {
  __m512i lanes[8];
  for (auto& lane : lanes) lane = _mm512_setzero_si512();
  for (const char* p = begin; p < end; p += sizeof lanes)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      lanes[i] = _mm512_xor_si512(lanes[i], _mm512_load_si512(p + 64 * i));
  for (int i = 1; i < 8; ++i) lanes[0] = _mm512_xor_si512(lanes[0], lanes[i]);
  return _mm512_reduce_add_epi64(lanes[0]);
}

template <typename Work>
void on_all(Work work) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t)
    threads.emplace_back([=] { work(t, static_cast<char*>(memory) + share * t); });
  for (auto& thread : threads) thread.join();
}
}  // namespace

extern "C" int prepare(size_t bytes, int threads, int huge) {
  count = threads;
  share = bytes / threads / 4096 * 4096;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  memory = mmap(nullptr, share * threads, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, share * threads, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  on_all([](int t, char* begin) { std::memset(begin, t + 1, share); });
  return 0;
}

extern "C" long long read_all() {
  std::vector<long long> sums(count * 16);
  on_all([&](int t, char* begin) { sums[16 * t] = xor_of(begin, begin + share); });
  long long sum = 0;
  for (const long long s : sums) sum += s;
  return sum;
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """The program as a library."""
    source, library = folder / "reading.cpp", folder / "reading.so"
    source.write_text(PROGRAM)
    flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.prepare.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    return loaded


def mapped(num_bytes: int) -> np.ndarray:
    """A read-only file mapping of random bytes, as the bench makes one."""
    chunk = np.random.default_rng(1).integers(0, 256, 1 << 26, np.uint8)
    with tempfile.TemporaryFile() as file:
        for _ in range(num_bytes // chunk.nbytes):
            file.write(chunk.data)
        file.flush()
        return map_read_only(file.fileno(), num_bytes)


def compare(threads: int, gib: float, huge: bool) -> float:
    """Print both rates round by round, each program between two bursts of the other's.

    Returns the median ratio, the bench's reading over the program's.
    """
    num_bytes = int(gib * 16) << 26
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
    if program.prepare(num_bytes, threads, huge):
        sys.exit("no memory for the program's buffer")
    reader = Reader(mapped(num_bytes), {threads: _native.ThreadPool(threads)}, seconds=0.3)
    reader.read_all(threads)

    def program_rate() -> float:
        began = time.perf_counter()
        program.read_all()
        return num_bytes / (time.perf_counter() - began)

    ratios = []
    program_rate()
    before = program_rate()
    print(f"{threads} threads, {gib:g} GiB, GB/s: plain, with prefetch | program | best / program")
    for _ in range(ROUNDS):
        reading = reader.read(threads)
        after = program_rate()
        mean = (before + after) / 2
        ratios.append(reading.best / mean)
        print(
            f"{reading.plain / 1e9:7.2f} {reading.prefetched / 1e9:7.2f} | {mean / 1e9:7.2f} | "
            f"{ratios[-1]:.3f}"
        )
        before = after
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=_native.available_cpus())
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--small", action="store_true", help="no huge pages for the program")
    arguments = parser.parse_args()
    difference = compare(arguments.threads, arguments.gib, not arguments.small) - 1
    sys.exit(abs(difference) > MAX_DIFFERENCE)
