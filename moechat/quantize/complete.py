"""Whether a folder already holds the whole result of a job: then there is nothing left to do.

Its journal is gone, so that is seen from the files. It happens when a process is killed after its
last step, and when a command is given twice.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from pathlib import Path

from moechat.errors import MoechatError
from moechat.quantize.convert import Encoder
from moechat.quantize.plan import Plan

# Layers whose first piece is converted again and compared: another model of the same shape differs
# in some of them, and they cost a second or two.
_COMPARED_LAYERS = 64


def is_complete(folder: Path, plan: Plan, copied: list[Path], written: Mapping[str, bytes]) -> bool:
    """Whether ``folder`` holds what this job would write, and nothing else.

    Compared are names, sizes, headers, all files besides the weights, and samples of the weights.
    """
    names = [shard.name for shard in plan.shards] + [path.name for path in copied] + [*written]
    try:
        if sorted(os.listdir(folder)) != sorted(names):
            return False
        return (
            all(_begins(folder / s.name, s.file_bytes, s.header) for s in plan.shards)
            and all(_begins(folder / name, len(text), text) for name, text in written.items())
            and all(filecmp.cmp(path, folder / path.name, shallow=False) for path in copied)
            and _samples_agree(folder, plan)
        )
    except (OSError, MoechatError):
        return False


def _begins(path: Path, num_bytes: int, begin: bytes) -> bool:
    """Whether a file has this size and begins with these bytes."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size == num_bytes and file.read(len(begin)) == begin


def _samples_agree(folder: Path, plan: Plan) -> bool:
    encode = Encoder(plan)
    try:
        for index in range(0, len(plan.layers), -(-len(plan.layers) // _COMPARED_LAYERS) or 1):
            task = next(plan.tasks(index), None)
            if task is None:  # a tensor without elements
                continue
            with (folder / plan.shards[plan.layers[index].shard].name).open("rb") as file:
                for position, content in encode(task)[0]:
                    file.seek(position)
                    if file.read(content.nbytes) != content.tobytes():
                        return False
        return True
    finally:
        encode.close()
