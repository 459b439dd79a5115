"""Files of the folder that is written: temporary names, renamed when they are whole and on disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from moechat.errors import DoesNotFit, MoechatError, Usage

PART_SUFFIX = ".part"
JOURNAL_NAME = "quantize.journal"
RESUME = "The same command goes on where this one stopped"
# Kept back: what the file system itself needs, and others who write meanwhile.
_MARGIN_BYTES, _MARGIN_FRACTION = 16_000_000, 0.01
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def part_path(folder: Path, name: str) -> Path:
    """Where a file is while it is not whole."""
    return folder / (name + PART_SUFFIX)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into DoesNotFit for a full disk, MoechatError for anything else."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            free_bytes = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
            raise DoesNotFit(
                f"{path} cannot be written",
                f"{reason}; {free_bytes} bytes are free",
                f"Make room. {RESUME}",
            ) from None
        raise MoechatError(f"{path} cannot be written", reason, RESUME) from None


def write_at(file: int, path: Path, position: int, content: memoryview) -> None:
    """All bytes of ``content`` at ``position``. Raises as ``writing`` does."""
    with writing(path):
        while content:
            count = os.pwrite(file, content, position)
            position += count
            content = content[count:]


def finish_file(folder: Path, name: str) -> None:
    """Bring a file to disk and give it its name. Raises as ``writing`` does."""
    part = part_path(folder, name)
    with writing(part):
        file = os.open(part, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(part, folder / name)
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring the folder's own entries to disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_file(folder: Path, name: str, content: bytes) -> None:
    """A small file, whole or not at all."""
    part = part_path(folder, name)
    with writing(part):
        part.write_bytes(content)
    finish_file(folder, name)


def check_target(folder: Path) -> None:
    """Usage unless the folder can be made, or is empty, or holds a journal."""
    if not os.path.isdir(folder.parent):
        raise Usage(f"{folder} cannot be made", f"there is no folder {folder.parent}")
    if not os.path.lexists(folder):
        return
    if not os.path.isdir(folder):
        raise Usage(f"{folder} exists and is no folder", next_step="Choose another name")
    if os.listdir(folder) and not os.path.isfile(folder / JOURNAL_NAME):
        raise Usage(
            f"{folder} exists and is not empty",
            "nothing is overwritten",
            "Choose another folder or remove this one",
        )


def check_space(folder: Path, needed_bytes: int) -> None:
    """DoesNotFit unless ``needed_bytes`` fit, what the folder already holds counted in."""
    place = folder if folder.is_dir() else folder.parent
    status = os.statvfs(place)
    free_bytes = status.f_bavail * status.f_frsize
    present_bytes = 0
    if folder.is_dir():
        with os.scandir(folder) as entries:
            present_bytes = sum(
                entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries
            )
    margin_bytes = _MARGIN_BYTES + int(needed_bytes * _MARGIN_FRACTION)
    missing_bytes = needed_bytes + margin_bytes - free_bytes - present_bytes
    if missing_bytes > 0:
        raise DoesNotFit(
            f"the result does not fit on the disk of {place}",
            f"it needs {needed_bytes / 1e9:.2f} GB and {margin_bytes / 1e9:.2f} GB of margin; "
            f"{free_bytes / 1e9:.2f} GB are free"
            + (f" and {present_bytes / 1e9:.2f} GB are written" if present_bytes else ""),
            f"{missing_bytes / 1e9:.2f} GB more are needed",
        )
