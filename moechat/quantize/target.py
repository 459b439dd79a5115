"""Files of the folder that is written: temporary names, renamed when they are whole and on disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from moechat.errors import DoesNotFit, MoechatError, Usage
from moechat.sizes import size_text

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


def check_target(source: Path, folder: Path) -> None:
    """Usage unless the folder can be made or is one, and neither of the two lies in the other."""
    try:
        # The longest name that surely comes into it.
        os.lstat(part_path(folder, "model-00001-of-00001.safetensors"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise cannot_be_made(folder, error) from None
    if not os.path.isdir(folder.parent):
        raise Usage(f"{folder} cannot be made", f"there is no folder {folder.parent}")
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise Usage(f"{folder} exists and is no folder", next_step="Choose another name")
    places = os.path.realpath(source), os.path.realpath(folder)
    outer = os.path.commonpath(places)
    if outer in places:
        relation = "lies in" if outer == places[0] else "holds"
        if places[0] == places[1]:
            relation = "is"
        raise Usage(
            f"{folder} cannot be the result's folder",
            f"it {relation} the source {source}, which is only read",
            "Choose a folder beside it",
        )


def is_occupied(folder: Path) -> bool:
    """Whether the folder holds something, and not a job's journal."""
    try:
        return os.path.isdir(folder) and bool(os.listdir(folder)) and not _has_journal(folder)
    except OSError as error:
        raise Usage(f"{folder} cannot be read", error.strerror or str(error)) from None


def occupied(folder: Path) -> Usage:
    """The error for a folder that holds something else."""
    return Usage(
        f"{folder} exists and is not empty",
        "nothing is overwritten",
        "Choose another folder or remove this one",
    )


def make_folder(folder: Path) -> None:
    """Make the folder if it is not there. Raises Usage when that cannot be, DoesNotFit."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
    except OSError as error:
        if error.errno in _FULL:
            with writing(folder):
                raise
        raise cannot_be_made(folder, error) from None


def cannot_be_made(folder: Path, error: OSError) -> Usage:
    """The error for a folder that the system does not make."""
    return Usage(
        f"{ascii(str(folder))[1:-1][:200]} cannot be made",
        error.strerror or str(error),
        "Choose another name or place",
    )


def _has_journal(folder: Path) -> bool:
    return os.path.isfile(folder / JOURNAL_NAME)


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
            f"it needs {size_text(needed_bytes)} and {size_text(margin_bytes)} of margin; "
            f"{size_text(free_bytes)} are free"
            + (f" and {size_text(present_bytes)} are written" if present_bytes else ""),
            f"{size_text(missing_bytes)} more are needed",
        )
