"""The table of instruction sets."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native


def test_the_best_is_first_and_ref_is_last() -> None:
    names = _native.supported_instruction_sets()
    order = ["amx", "avx512bf16", "avx512", "avx2", "ref"]
    assert names == [name for name in order if name in names]
    assert names[-1] == "ref"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = set(file.read().partition("flags")[2].partition("\n")[0].split())
    assert ("avx2" in names) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512bf16" in names) == ({"avx512_bf16", "avx512vbmi", "avx512vl"} <= flags)
    if "amx" in names:  # the system may refuse it
        assert {"amx_tile", "amx_bf16"} <= flags and names[1] == "avx512bf16"


def test_forcing_takes_effect(isa: str) -> None:
    assert _native.active_instruction_set() == isa


@pytest.mark.parametrize("name", ["", "AVX2", "sse2", "avx512bf16 ", "é"])
def test_an_unknown_name_lists_the_choices_and_changes_nothing(name: str) -> None:
    before = _native.active_instruction_set()
    with pytest.raises(_native.NativeError) as caught:
        _native.force_instruction_set(name)
    stable_name, message = caught.value.args
    assert stable_name == "isa-unsupported"
    for choice in _native.supported_instruction_sets():
        assert choice in message
    assert _native.active_instruction_set() == before


# Multiplications and additions of one iteration: independent dot products.
PEAK_OPERATIONS = {
    "ref": 8 * 2, "avx2": 12 * 8 * 2, "avx512": 24 * 16 * 2, "avx512bf16": 24 * 32 * 2,
    "amx": 4 * 16 * 16 * 32 * 2,
}  # fmt: skip


def test_dot_peak_counts_its_operations(isa: str) -> None:
    for iterations in (0, 1, 1000):
        assert _native.dot_peak(iterations) == iterations * PEAK_OPERATIONS[isa]
    with pytest.raises(_native.NativeError, match="iterations"):
        _native.dot_peak(-1)


def test_reading_sums_the_words_of_the_range() -> None:
    array = np.random.default_rng(3).integers(0, 256, 3000, np.uint8)
    for begin, end in [(0, 3000), (0, 0), (1, 2), (7, 15), (3, 2600), (5, 516), (0, 512)]:
        part = array[begin:end].tobytes()
        words = np.frombuffer(part + b"\0" * (-len(part) % 8), "<u8")
        assert _native.read_checksum(array, begin, end) == sum(map(int, words)) % 2**64
    for begin, end in [(-1, 5), (5, 4), (0, 3001)]:
        with pytest.raises(_native.NativeError, match="outside"):
            _native.read_checksum(array, begin, end)
