"""Synthetic checkpoints on disk: built in the cache folder, removed at the end.

Whoever builds and uses one holds a lock on it, which the system releases when a process dies,
however it dies: a folder that nobody has locked is left over, and the next run removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moechat.bench.amounts import cache_variable, shown
from moechat.bench.synthetic.config import Shape, config_of
from moechat.bench.synthetic.tensors import Part, Recipe, by_file, stored_parts, total_bytes
from moechat.bench.synthetic.weights import RandomBytes, write_safetensors
from moechat.errors import DoesNotFit, Usage
from moechat.folders import cache_folder
from moechat.sizes import size_text
from moechat.weights.mapped import INDEX_NAME

Progress = Callable[[int, int], None]  # told of bytes written and bytes in all
_LOCK = ".lock"


@dataclass(frozen=True)
class SyntheticModel:
    """A synthetic checkpoint that is there and locked."""

    path: Path
    shape: Shape
    recipe: Recipe

    def part(self, shape: Shape) -> Path:
        """A folder with the first layers of this model alone, on the same files.

        ``shape`` is this one's with fewer layers, or another vocabulary: its embedding and head are
        then written, small.
        """
        label = f"{shape.dense_layers}-dense-{shape.moe_layers}-moe-{shape.vocab}-vocab"
        folder = self.path / label
        if not folder.exists():
            folder.mkdir()
            parts = stored_parts(shape, self.recipe)
            for name, held in by_file(parts):
                if held[0].layer is None and shape.vocab != self.shape.vocab:
                    write_safetensors(folder / name, held, RandomBytes(), lambda _: None)
                else:
                    (folder / name).symlink_to(Path("..") / name)
            _write_json_files(folder, shape, self.recipe, parts)
        return folder


def synthetic_root() -> Path:
    """Where the folders are."""
    return cache_folder() / "synthetic"


@contextlib.contextmanager
def synthetic_model(shape: Shape, recipe: Recipe, progress: Progress) -> Iterator[SyntheticModel]:
    """A model for the time of the context. Raises DoesNotFit when the disk fills up."""
    root = synthetic_root()
    with contextlib.ExitStack() as stack:
        with _locked(root):
            path = Path(tempfile.mkdtemp(prefix=f"{shape.name}-{recipe.label}-", dir=root))
            stack.callback(_remove, path)
            stack.enter_context(_locked(path))
        write_model(path, shape, recipe, progress)
        yield SyntheticModel(path, shape, recipe)


def write_model(path: Path, shape: Shape, recipe: Recipe, progress: Progress) -> None:
    """Files of a model in an existing folder. Raises DoesNotFit when the disk fills up."""
    parts = stored_parts(shape, recipe)
    num_bytes, done = total_bytes(parts), 0

    def count(written: int) -> None:
        nonlocal done
        done += written
        progress(done, num_bytes)

    random = RandomBytes()
    try:
        for name, held in by_file(parts):
            write_safetensors(path / name, held, random, count)
        _write_json_files(path, shape, recipe, parts)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DoesNotFit(
            f"the disk is full: {shown(path.parent)}",
            f"{size_text(done)} of {size_text(num_bytes)} were written",
            f"Fewer --layers or --experts need less; {cache_variable()} names another folder",
        ) from None


def _write_json_files(folder: Path, shape: Shape, recipe: Recipe, parts: list[Part]) -> None:
    config, quantization = config_of(shape), recipe.quantization_config()
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    owners = {part.name: name for name, held in by_file(parts) for part in held}
    index = {"metadata": {"total_size": total_bytes(parts)}, "weight_map": owners}
    (folder / INDEX_NAME).write_text(json.dumps(index), "utf-8")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """``folder`` is in use; of the root: nobody else makes or removes folders in it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _open_lock(folder)
    except OSError:
        # A full disk, or something else of that name: that must not keep us from making room.
        lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def make_room() -> int:
    """Remove folders that no living process uses; the bytes that are then free on their disk.

    Raises Usage where the cache folder cannot be made.
    """
    root = synthetic_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(
            f"the folder {shown(root)} cannot be made",
            error.strerror or str(error),
            f"{cache_variable()} names another place",
        ) from None
    with _locked(root):
        for path in root.iterdir():
            # One that is locked, or somebody else's, or odd, is left alone.
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    _remove_unlocked(path)
    return shutil.disk_usage(root).free


def _remove_unlocked(path: Path) -> None:
    lock = _open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # Ctrl-C or the like meanwhile
        shutil.rmtree(path, ignore_errors=True)
        raise
