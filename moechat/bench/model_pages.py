"""Page tables filled before anything is timed.

A page of a mapped file costs a page fault when a process first reads it there, also when the file
is in memory. In a long talk that has happened for all experts; in short bursts it would be most of
what is measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

_MADV_POPULATE_READ = 22  # Linux 5.14


def populate(files: Iterable[Path], room_bytes: int) -> bool:
    """Fill the page tables of every mapping that this process has of ``files``.

    False when nothing was done: they are larger than ``room_bytes`` in all, or this system cannot.
    """
    paths = {str(path.resolve()) for path in files}
    if sum(Path(path).stat().st_size for path in paths) > room_bytes:
        return False
    try:
        ranges = list(_mappings(paths))
    except (OSError, ValueError):
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failed = [madvise(begin, end - begin, _MADV_POPULATE_READ) for begin, end in ranges]
    return bool(ranges) and not any(failed)


def _mappings(paths: set[str]) -> Iterator[tuple[int, int]]:
    """Addresses of the mappings of files."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in paths:
            begin, _, end = fields[0].partition("-")
            yield int(begin, 16), int(end, 16)
