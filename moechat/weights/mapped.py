"""A checkpoint folder as read-only mappings: every tensor is a view of its file's own bytes."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged, ModelNotFound
from moechat.json_file import read_json_object
from moechat.weights.free_memory import free_memory_bytes
from moechat.weights.safetensors_header import TensorSpan, quoted, read_header

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_INDEX_LIMIT_BYTES = 256_000_000

# Types without a numpy equal are shown as raw bits of their width.
_VIEW_DTYPES = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.uint16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in its file. ``dtype`` is safetensors' own name for it ("F32", "F8_E4M3", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    file_content: NDArray[np.uint8]
    begin_byte: int

    @property
    def array(self) -> NDArray[Any]:
        """Read-only view [*shape] of the mapping, made on demand and without a copy.

        float32 for F32, uint16 for BF16 and F16, uint8 for FP8 and BOOL, numpy's equal for the
        rest. May be unaligned: the format does not align tensors. It keeps the mapping alive.
        """
        view: NDArray[Any] = np.ndarray(
            self.shape, _VIEW_DTYPES[self.dtype], self.file_content, offset=self.begin_byte
        )
        return view


class Checkpoint:
    """All tensors of a model folder, mapped MAP_SHARED and PROT_READ."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor], total_bytes: int) -> None:
        self.folder = folder
        self.tensors = tensors
        self.total_bytes = total_bytes

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Map the folder's safetensors files and check their headers; weights are not read.

        Raises ModelNotFound when there are none, CheckpointDamaged for anything wrong with them.
        """
        files, owners = _find_files(folder)
        promised: dict[str, list[str]] = {path.name: [] for path in files}
        for name, owner in owners.items():
            promised[owner].append(name)
        tensors: dict[str, StoredTensor] = {}
        total_bytes = 0
        for path, content in map_files(files):
            spans = read_header(path, content)
            _check_promise(path, spans, promised[path.name], owners)
            for name, dtype, shape, begin_byte, end_byte in spans:
                if name in tensors:
                    raise CheckpointDamaged(
                        f"{path} is damaged",
                        f"tensor {quoted(name)} is also in {tensors[name].file.name}",
                        "Download both files again",
                    )
                tensors[name] = StoredTensor(name, dtype, shape, path, content, begin_byte)
                total_bytes += end_byte - begin_byte
        return cls(folder, tensors, total_bytes)

    def close(self) -> None:
        """Let go of the mappings; each is unmapped when the last array on it is gone."""
        self.tensors = {}


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The folder's weight files, and the file name of each tensor that an index names."""
    if os.path.lexists(folder / INDEX_NAME):
        return _files_of_index(folder)
    single = folder / _SINGLE_NAME
    if os.path.isfile(single):
        return [single], {}
    try:
        files = sorted(path for path in folder.glob("*.safetensors") if os.path.isfile(path))
    except OSError as error:
        raise ModelNotFound(f"{folder} cannot be read", error.strerror or str(error)) from None
    if not files:
        raise ModelNotFound(f"{folder} has no weights", "it holds no .safetensors file")
    # "model-00001-of-00003" alone is a part of a model, also when the other parts are missing.
    if len(files) > 1 or ("-of-" in files[0].stem and not files[0].stem.endswith("-of-00001")):
        raise CheckpointDamaged(
            f"{folder / INDEX_NAME} is missing",
            f"the folder holds {len(files)} part(s) of a model and nothing that lists them",
            "Download it from where the weights came from",
        )
    return files, {}


def _files_of_index(folder: Path) -> tuple[list[Path], dict[str, str]]:
    path = folder / INDEX_NAME
    owners = read_json_object(path, _INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(owners, dict) or not owners:
        raise CheckpointDamaged(f"{path} is damaged", "it has no weight_map", "Download it again")
    names = set()
    for tensor, name in owners.items():
        # A name is used as a path only when it stays inside the folder.
        if not isinstance(name, str) or not name or os.path.basename(name) != name or "\0" in name:
            raise CheckpointDamaged(
                f"{path} is damaged",
                f"it puts tensor {quoted(tensor)} into {ascii(name)[:120]}, which is no file name",
            )
        names.add(name)
    files = [folder / name for name in sorted(names)]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        listing = ", ".join(ascii(name)[1:-1] for name in missing)
        raise CheckpointDamaged(
            f"{folder} is incomplete",
            f"{len(missing)} of {len(files)} weight files are missing: {listing}",
            "Download them into that folder",
        )
    return files, owners


def map_files(paths: Sequence[Path]) -> Iterator[tuple[Path, NDArray[np.uint8]]]:
    """Each file and its bytes, read-only uint8 [size in bytes], over a shared mapping.

    Large pages are asked for where memory holds all of the files: what has to come from the disk is
    then read in pieces of 2 MiB (Linux 5.18), which file systems with large folios map as single
    pages. Files beyond the memory are read in small pieces, as far as they are used.
    Raises CheckpointDamaged for one that cannot be mapped, when its turn comes.
    """
    large_pages = _fit_in_memory(paths)
    for path in paths:
        yield path, _map_file(path, large_pages)


def _fit_in_memory(paths: Sequence[Path]) -> bool:
    try:
        num_bytes = sum(os.stat(path).st_size for path in paths)
    except OSError:  # _map_file has the message for it
        return False
    return num_bytes <= (free_memory_bytes() or 0)


def _map_file(path: Path, large_pages: bool) -> NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            # mmap refuses length 0, and the header check has the better message for it.
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, np.uint8)
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        why = f"it cannot be mapped ({error.strerror})"
        raise CheckpointDamaged(f"{path} cannot be used", why) from None
    if large_pages:
        # Before anything is read, the header included: what is in memory in small pages stays so.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # The array, not the mapping, is what tensors hold on to: numpy keeps the buffer exported, so
    # the mapping cannot be closed under a view.
    return np.frombuffer(mapping, np.uint8)


def drop_pages(contents: Iterable[NDArray[np.uint8]]) -> None:
    """Let go of this process's pages of map_files' mappings; they come back when they are read."""
    for content in {id(content): content for content in contents}.values():
        if isinstance(content.base, memoryview) and isinstance(content.base.obj, mmap.mmap):
            content.base.obj.madvise(mmap.MADV_DONTNEED)


def _check_promise(
    path: Path, spans: list[TensorSpan], promised: list[str], owners: dict[str, str]
) -> None:
    """CheckpointDamaged unless the file holds every tensor that the index puts there."""
    held = {span.name for span in spans}
    absent = [name for name in promised if name not in held]
    if not absent:
        return
    why = f"it does not hold {quoted(absent[0])}"
    if len(absent) > 1:
        why += f" and {len(absent) - 1} more tensors"
    why += f" that {INDEX_NAME} puts there"
    others = {owners[name] for name in held if name in owners} - {path.name}
    if others:
        names = ", ".join(quoted(other) for other in sorted(others)[:3])
        why += f"; it holds tensors of {names}: the files may be swapped"
    raise CheckpointDamaged(f"{path} is damaged", why, f"Download it and {INDEX_NAME} again")
