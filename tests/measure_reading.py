"""The bench's plain reading against a reading program of its own: see ``compare``.

Run by hand: ``python tests/measure_reading.py [--threads 2] [--gib 2]``; exit code 1 when the two
loops, on the same bytes, differ by more than a tenth. Needs a C++ compiler.
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
from moechat.bench.kernels.expert_weights import map_read_only
from moechat.bench.reading import Reader

ROUNDS = 9
MAX_DIFFERENCE = 0.1
# One thread a share of a buffer, 512-bit loads, eight accumulators, no prefetch.
PROGRAM = r"""
#include <immintrin.h>
#include <sys/mman.h>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace {

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

}  // namespace

// A filled anonymous buffer of whole huge pages; null when there is no memory.
extern "C" char* buffer(size_t bytes, int huge) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return static_cast<char*>(std::memset(memory, 7, bytes));
}

extern "C" long long read_all(const char* memory, size_t bytes, int count) {
  const size_t share = bytes / count / 4096 * 4096;
  std::vector<long long> sums(count * 16);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t)
    threads.emplace_back(
        [&, t] { sums[16 * t] = xor_of(memory + share * t, memory + share * (t + 1)); });
  long long sum = 0;
  for (auto& thread : threads) thread.join();
  for (const long long s : sums) sum += s;
  return sum;
}
"""
NAMES = ("plain", "prefetch", "huge", "program", "small")


def compiled(folder: Path) -> ctypes.CDLL:
    """The program as a library."""
    source, library = folder / "reading.cpp", folder / "reading.so"
    source.write_text(PROGRAM)
    flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.buffer.argtypes = [ctypes.c_size_t, ctypes.c_int]
    loaded.buffer.restype = ctypes.c_void_p
    loaded.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.read_all.restype = ctypes.c_longlong
    return loaded


def mapped(num_bytes: int) -> np.ndarray:
    """A read-only file mapping of random bytes, as the bench makes one."""
    chunk = np.random.default_rng(1).integers(0, 256, 1 << 26, np.uint8)
    with tempfile.TemporaryFile() as file:
        for _ in range(num_bytes // chunk.nbytes):
            file.write(chunk.data)
        file.flush()
        return map_read_only(file.fileno(), num_bytes)


def compare(threads: int, gib: float) -> float:
    """Print GB/s of all contestants, in turns, and medians of ratios within a round.

    plain, prefetch: the bench's two ways to read its mapping. program: the program on the same
    mapping. huge, small: the program on an anonymous buffer of its own, with and without huge
    pages, which tells what the pages of a file cost. Returns the ratio plain / program.

    Time is the threads' processor time: waiting for memory is in it, waiting for a processor that
    somebody else uses is not. On a machine with nothing else to do it is the time that passed.
    """
    processors = min(threads, _native.available_cpus())

    def clock() -> float:
        return time.process_time() / processors

    num_bytes = int(gib * 16) << 26
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
    mapping = mapped(num_bytes)
    # The mapping is never read twice in a row: a large cache would still hold a part of it.
    places = [program.buffer(num_bytes, 1), mapping.ctypes.data, program.buffer(num_bytes, 0)]
    if not all(places):
        sys.exit("no memory for the program's buffers")
    reader = Reader([mapping], {threads: _native.ThreadPool(threads)}, 0.3, clock)
    reader.read_all(threads)

    def program_rate(place: int) -> float:
        began = clock()
        program.read_all(place, num_bytes, threads)
        return num_bytes / (clock() - began)

    rounds = []
    print(f"{threads} threads, {gib:g} GiB, GB/s\n" + "".join(f"{name:>9}" for name in NAMES))
    for _ in range(ROUNDS):
        reading = reader.read(threads)
        rounds.append([reading.plain, reading.prefetched, *map(program_rate, places)])
        print("".join(f"{rate / 1e9:9.2f}" for rate in rounds[-1]))

    def ratio(text: str, values: list[float]) -> float:
        median = statistics.median(values)
        print(f"{text} {median:.3f} (min {min(values):.3f}, max {max(values):.3f})")
        return median

    ratio("best of the bench / program with huge pages", [max(r[:2]) / r[2] for r in rounds])
    ratio("best of the bench / program with small pages", [max(r[:2]) / r[4] for r in rounds])
    return ratio("plain / program, same mapping", [r[0] / r[3] for r in rounds])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=_native.available_cpus())
    parser.add_argument("--gib", type=float, default=2)
    arguments = parser.parse_args()
    sys.exit(abs(compare(arguments.threads, arguments.gib) - 1) > MAX_DIFFERENCE)
