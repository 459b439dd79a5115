"""One job from a folder to a folder: planned, checked, worked off, taken up again if need be."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moechat import __version__
from moechat.quantize.folder_files import (
    CONFIG_NAME,
    new_config,
    new_index,
    other_files,
    read_config,
    source_identity,
)
from moechat.quantize.journal import Journal
from moechat.quantize.plan import SHARD_BYTES, TargetFormat, make_plan
from moechat.quantize.report import Report, report_kinds
from moechat.quantize.run import Progress, Run
from moechat.quantize.source import check_method, read_layers
from moechat.quantize.target import (
    check_space,
    check_target,
    finish_file,
    part_path,
    write_file,
    writing,
)
from moechat.weights.mapped import INDEX_NAME, Checkpoint


class Job:
    """Writes the model folder ``source`` in the format ``to`` into the new folder ``target``.

    Making one reads headers only and writes nothing. Raises ModelNotFound, CheckpointDamaged or
    ArchitectureUnsupported for a source that cannot be read, Usage for a target that cannot be one.
    """

    def __init__(
        self, source: Path, target: Path, to: TargetFormat, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._target = target
        config = read_config(source)
        check_method(config)
        check_target(target)
        checkpoint = Checkpoint.open(source)
        self._plan = make_plan(read_layers(checkpoint), to, shard_bytes)
        self._copied = other_files(source)
        self._written = {
            INDEX_NAME: new_index(self._plan),
            CONFIG_NAME: new_config(config, self._plan),
        }
        self._identity = {
            "moechat": __version__,
            "to": to,
            "shard_bytes": str(shard_bytes),
            "source": source_identity(checkpoint, self._copied),
        }
        self._cancelled = threading.Event()

    @property
    def needed_bytes(self) -> int:
        """What the result will occupy, to the byte."""
        return (
            sum(shard.file_bytes for shard in self._plan.shards)
            + sum(path.stat().st_size for path in self._copied)
            + sum(map(len, self._written.values()))
        )

    def cancel(self) -> None:
        """Stop soon, and keep what is done; from any thread."""
        self._cancelled.set()

    def run(self, on_progress: Callable[[Progress], None]) -> Report | None:
        """Do it, or the rest of it; None when it was cancelled.

        ``on_progress`` is called often, in this thread. Raises DoesNotFit for a disk without room,
        CheckpointDamaged for weights that cannot be read or are not finite, Usage as Journal does.
        After any of them the job can be taken up again.
        """
        began = time.monotonic()
        check_space(self._target, self.needed_bytes)
        journal = Journal(self._target, self._identity, len(self._plan.layers))
        try:
            run = Run(self._plan, self._target, journal, on_progress, self._cancelled.is_set)
            if not run.work_off():
                return None
            for path in self._copied:
                self._copy(path)
            for name, content in self._written.items():  # config.json last: it makes a model of it
                write_file(self._target, name, content)
            journal.remove()
        finally:
            journal.close()
        plan = self._plan
        return Report(
            to=plan.to,
            kinds=report_kinds(plan, journal.records),
            left=plan.left,
            bytes_before=sum(layer.layer.stored_bytes for layer in plan.layers),
            bytes_after=sum(layer.written_bytes for layer in plan.layers),
            num_files=len(plan.shards),
            read_bytes=run.read_bytes,
            seconds=time.monotonic() - began,
            resumed=run.resumed,
        )

    def _copy(self, path: Path) -> None:
        part = part_path(self._target, path.name)
        with writing(part):
            shutil.copyfile(path, part)
        finish_file(self._target, path.name)
