"""Random expert weights in a file that is mapped read-only, as a checkpoint's are."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.bench.amounts import shown
from moechat.bench.kernels.experts import ExpertShape
from moechat.bench.kernels.stored_matrix import StoredMatrix, random_matrix
from moechat.bench.machine import available_memory_bytes, last_level_cache_bytes
from moechat.errors import DoesNotFit, Usage
from moechat.folders import cache_folder
from moechat.sizes import size_text

MATRICES = ("gate", "up", "down")
_LEAST_EXPERTS = 64
_MOST_EXPERTS = 4096
_CACHES = 2  # the weights are at least so many times the last-level cache
_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 32 << 20
_DISK_RESERVE_BYTES = 1 << 28
# Of the available memory: the file must stay in the page cache, beside whatever else runs.
_MEMORY_SHARE = 0.8
_MOVES_IT = "name another folder in TMPDIR"

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class ExpertWeights:
    """Experts in one mapping. ``bytes`` [file size] is the whole of it, read-only.

    ``experts[e]["gate" | "up" | "down"]`` are views into it. ``expert_bytes``: weights and scales
    of one expert, without the padding between them.
    """

    format: str
    bytes: NDArray[np.uint8]
    expert_bytes: int
    experts: list[dict[str, _native.MatrixView]]


def map_experts(
    format: str, shape: ExpertShape, num_experts: int | None, progress: Progress, *, seed: int = 1
) -> ExpertWeights:
    """Write ``num_experts`` experts to an unlinked temporary file and map it.

    None: 64, or more where the caches could hold a good part of them.
    One random matrix a kind is made; each expert has its rows in another order (moved along), so
    that no two pages are equal. The file lies in $TMPDIR, else in the cache folder, and is gone
    when the process ends, however it ends. Raises DoesNotFit and Usage.
    """
    folder = _folder()
    # Before a single matrix is made: no format has less than half a byte a weight.
    least_experts = num_experts or shape.experts_per_token
    _check_room(folder, least_experts * len(MATRICES) * shape.hidden * shape.inner // 2)
    generator = np.random.default_rng(seed)
    wide = random_matrix(format, shape.inner, shape.hidden, generator)
    kinds = {"gate": wide, "up": wide, "down": _down(format, shape, generator, wide)}
    places, expert_stride = _layout(kinds)
    if num_experts is None:
        num_experts = _enough_experts(expert_stride, shape)
    num_bytes = num_experts * expert_stride
    _check_room(folder, num_bytes)
    with tempfile.TemporaryFile(dir=folder, prefix="moechat-bench-", buffering=0) as file:
        _write(file.fileno(), kinds, places, expert_stride, num_experts, progress)
        mapped = map_read_only(file.fileno(), num_bytes)
    experts = [
        {name: _view(kinds[name], places[name], mapped, e * expert_stride) for name in MATRICES}
        for e in range(num_experts)
    ]
    return ExpertWeights(format, mapped, sum(kinds[n].num_bytes for n in MATRICES), experts)


def map_read_only(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """A file's bytes [num_bytes], shared and read-only, in ordinary pages.

    Freshly written files may lie in the page cache in pieces large enough for huge pages, which no
    measurement should depend on.
    """
    mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _enough_experts(expert_bytes: int, shape: ExpertShape) -> int:
    wanted = -(-_CACHES * (last_level_cache_bytes() or 0) // expert_bytes)
    wanted = max(_LEAST_EXPERTS, min(wanted, _MOST_EXPERTS))
    return -(-wanted // shape.experts_per_token) * shape.experts_per_token


def _down(
    format: str, shape: ExpertShape, generator: np.random.Generator, wide: StoredMatrix
) -> StoredMatrix:
    if shape.inner == shape.hidden:
        return wide
    return random_matrix(format, shape.hidden, shape.inner, generator)


def _layout(kinds: dict[str, StoredMatrix]) -> tuple[dict[str, dict[str, int]], int]:
    """Byte offsets of each part of each matrix within an expert, and from expert to expert."""
    places: dict[str, dict[str, int]] = {name: {} for name in MATRICES}
    offset = 0
    for name in MATRICES:
        for part, array in kinds[name].parts:
            places[name][part] = offset
            offset += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, offset


def _view(
    kind: StoredMatrix, places: dict[str, int], mapped: NDArray[np.uint8], origin: int
) -> _native.MatrixView:
    arrays = {}
    for part, like in kind.parts:
        begin = origin + places[part]
        stored = mapped[begin : begin + like.nbytes]
        arrays[part] = stored.view(like.dtype).reshape(like.shape)
    return kind.view(arrays)


def _write(
    descriptor: int,
    kinds: dict[str, StoredMatrix],
    places: dict[str, dict[str, int]],
    expert_stride: int,
    num_experts: int,
    progress: Progress,
) -> None:
    """All experts in one pass, then the disk is waited for: it must not work while we measure."""
    total = num_experts * expert_stride
    try:
        os.posix_fallocate(descriptor, 0, total)
        for expert in range(num_experts):
            for number, name in enumerate(MATRICES):
                for part, array in kinds[name].parts:
                    place = expert * expert_stride + places[name][part]
                    turn = (expert * len(MATRICES) + number) % len(array)
                    for chunk in _moved_along(array, turn):
                        place += os.pwrite(descriptor, chunk, place)
                        progress(place, total)
        os.fdatasync(descriptor)
    except OSError as error:
        raise DoesNotFit(
            "the weights to measure with cannot be written",
            error.strerror or "",
            f"Give fewer with --experts, or {_MOVES_IT}",
        ) from None
    progress(total, total)


def _moved_along(array: NDArray[Any], turn: int) -> Iterator[memoryview]:
    """The bytes of ``array`` beginning with row ``turn``, in pieces that can all be written."""
    for rows in (array[turn:], array[:turn]):
        stored = rows.reshape(-1).view(np.uint8).data
        for begin in range(0, len(stored), _CHUNK_BYTES):
            yield stored[begin : begin + _CHUNK_BYTES]


def _folder() -> Path:
    wanted = os.environ.get("TMPDIR")
    if wanted:
        # Python's tempfile would silently take another one.
        if not (os.path.isdir(wanted) and os.access(wanted, os.W_OK)):
            raise Usage(
                f"TMPDIR is {shown(Path(wanted))}", "there is no such folder that can be written"
            )
        return Path(wanted)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder


def _check_room(folder: Path, num_bytes: int) -> None:
    next_step = "Give fewer with --experts"
    what = f"{size_text(num_bytes)} of weights to measure with"
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes - _DISK_RESERVE_BYTES:
        raise DoesNotFit(
            f"{what} do not fit the disk",
            f"{shown(folder)} has {size_text(free_bytes)} free",
            f"{next_step}, or {_MOVES_IT}",
        )
    memory_bytes = available_memory_bytes()
    if num_bytes > _MEMORY_SHARE * memory_bytes:
        raise DoesNotFit(
            f"{what} do not fit the memory", f"{size_text(memory_bytes)} are available", next_step
        )
