"""Synthetic checkpoints on disk: built in the cache folder, removed at the end unless kept.

Whoever builds or uses one holds a lock on it, which the system releases when a process dies,
however it dies: a folder that nobody has locked and that was not to be kept is left over.
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
from typing import Any

from moechat.bench.synthetic_config import Shape, config_of
from moechat.bench.synthetic_cut import Cut, Wishes
from moechat.bench.synthetic_tensors import Part, Recipe, by_file, stored_parts, total_bytes
from moechat.bench.synthetic_weights import RandomBytes, write_safetensors
from moechat.errors import DoesNotFit
from moechat.folders import cache_folder
from moechat.weights.mapped import INDEX_NAME

# Told of bytes written and bytes in all.
Progress = Callable[[int, int], None]
_LOCK, _KEPT = ".lock", "kept.json"


@dataclass(frozen=True)
class SyntheticModel:
    """A synthetic checkpoint that is there and locked."""

    path: Path
    shape: Shape
    recipe: Recipe
    reused: bool = False

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
def synthetic_model(
    whole: Shape,
    recipe: Recipe,
    wishes: Wishes,
    plan: Callable[[], Cut],
    *,
    keep: bool,
    progress: Progress,
) -> Iterator[tuple[SyntheticModel, tuple[str, ...]]]:
    """A model that fits ``wishes``: one kept by an earlier run, or a new one as ``plan()`` says.

    Yields it with the plan's notes. Left-over folders are removed first. Raises DoesNotFit when
    the disk fills up.
    """
    root = synthetic_root()
    with contextlib.ExitStack() as stack:
        with _locked(root):
            _remove_left_over(root)
            kept = _find_kept(root, whole, recipe, wishes)
            if kept is not None:
                path, shape, notes = kept
                stack.enter_context(_hold(path))
            else:
                cut = plan()
                shape, notes = cut.shape, list(cut.notes)
                path = Path(tempfile.mkdtemp(prefix=_label(shape, recipe) + "-", dir=root))
                if not keep:
                    stack.callback(_remove, path)
                stack.enter_context(_hold(path))
        if kept is None:
            try:
                _build(path, shape, recipe, progress)
            except BaseException:
                _remove(path)
                raise
            if keep:
                facts = _facts(shape, recipe) | {"notes": notes}
                (path / _KEPT).write_text(json.dumps(facts), "utf-8")
        yield SyntheticModel(path, shape, recipe, kept is not None), tuple(notes)


def _label(shape: Shape, recipe: Recipe) -> str:
    """What it is: deepseek-v3-fp8-2-dense-1-moe-64-experts-129280-vocab."""
    return (
        f"{shape.name}-{recipe.label}-{shape.dense_layers}-dense-{shape.moe_layers}-moe-"
        f"{shape.experts}-experts-{shape.vocab}-vocab"
    )


def _facts(shape: Shape, recipe: Recipe) -> dict[str, Any]:
    """What a kept folder must agree with to be used again."""
    return {
        "name": shape.name,
        "precisions": recipe.precisions,
        "config": json.loads(json.dumps(config_of(shape))),
        "dense_layers": shape.dense_layers,
        "moe_layers": shape.moe_layers,
        "experts": shape.experts,
        "vocab": shape.vocab,
    }


def _find_kept(
    root: Path, whole: Shape, recipe: Recipe, wishes: Wishes
) -> tuple[Path, Shape, list[str]] | None:
    for marker in sorted(root.glob(f"*/{_KEPT}")):
        try:
            facts = json.loads(marker.read_text("utf-8"))
            counts = {
                key: int(facts[key]) for key in ("dense_layers", "moe_layers", "experts", "vocab")
            }
            notes = [str(note) for note in facts.pop("notes")]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        shape = whole.cut(**counts)
        if facts != _facts(shape, recipe):
            continue
        asked = (wishes.layers, wishes.experts, wishes.vocab)
        has = (shape.moe_layers, shape.experts, shape.vocab)
        if all(wish is None or wish == count for wish, count in zip(asked, has)):
            return marker.parent, shape, notes
    return None


def _build(path: Path, shape: Shape, recipe: Recipe, progress: Progress) -> None:
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
            f"the disk is full: {path.parent}",
            f"{done / 1e9:.2f} of {num_bytes / 1e9:.2f} GB were written",
            "Fewer --layers, --experts or --vocab need less",
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
def _locked(root: Path) -> Iterator[None]:
    """Nobody else looks for, makes or removes folders meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    """The folder is in use."""
    with (path / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _remove_left_over(root: Path) -> None:
    """Folders that were not to be kept and that no living process uses."""
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink() and not (path / _KEPT).exists():
            with (path / _LOCK).open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def free_disk_bytes() -> int:
    """Of the disk that synthetic_root() is on."""
    root = synthetic_root()
    root.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(root).free


def free_ram_bytes() -> int:
    """Memory that can be had without swapping, page cache included; a control group's limit too."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text("ascii")
        (line,) = (line for line in text.splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            free = min(free, int((Path("/sys/fs/cgroup") / name).read_text("ascii")))
    return free
