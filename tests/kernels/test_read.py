"""Plain reading by all threads of a pool: every byte of the range, once, on any number of them."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native

TASK_BYTES = 4 << 20


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_byte_of_the_range_is_read_once(threads, prefetch):
    array = np.random.default_rng(5).integers(0, 256, 2 * TASK_BYTES + 1003, np.uint8)
    pool = _native.ThreadPool(threads)
    ends = [(0, array.nbytes), (0, 0), (5, 5), (3, TASK_BYTES + 3), (64, TASK_BYTES + 65), (1, 700)]
    for begin, end in ends:
        part = array[begin:end].tobytes()
        words = np.frombuffer(part + b"\0" * (-len(part) % 8), "<u8")
        wanted = int(words.sum(dtype=np.uint64)) if len(words) else 0
        assert _native.read_bandwidth(pool, array, begin, end, prefetch) == wanted


def test_a_range_outside_is_refused():
    array = np.zeros(100, np.uint8)
    pool = _native.ThreadPool(1)
    for begin, end in [(-1, 5), (5, 4), (0, 101)]:
        with pytest.raises(_native.NativeError, match="outside"):
            _native.read_bandwidth(pool, array, begin, end)
    with pytest.raises(_native.NativeError, match="contiguous"):
        _native.read_bandwidth(pool, np.zeros((4, 4))[:, 1:], 0, 8)
