"""Works off the layers of a plan: hands out their pieces, notes what is finished, names files."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moechat.errors import MoechatError
from moechat.quantize.convert import Converter, Squares
from moechat.quantize.journal import Journal, Record
from moechat.quantize.plan import Plan, Task
from moechat.quantize.target import RESUME, finish_file, part_path, write_at, writing
from moechat.quantize.workers import Workers

# How much work a kill may cost, before what is finished is brought to disk and noted.
COMMIT_BYTES = 500_000_000
COMMIT_SECONDS = 5.0
# Bounds the memory in use: a worker needs up to 100 MB for the widest layers.
_MAX_WORKERS = 8


class Progress(NamedTuple):
    """How far a job is: tensors and bytes of the source, done and in all."""

    tensors_done: int
    num_tensors: int
    bytes_done: int
    num_bytes: int


@dataclass(slots=True)
class _OpenLayer:
    """A layer under way: pieces that are still out, what came back, how much of it is counted."""

    tasks_left: int
    squares: list[Squares] = field(default_factory=list)
    counted_bytes: int = 0


class Run:
    """One run of a job, from wherever the journal says that the last one stopped."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        journal: Journal,
        on_progress: Callable[[Progress], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._plan, self._folder, self._journal = plan, folder, journal
        self._on_progress, self._stopped = on_progress, stopped
        self.resumed = bool(journal.records)
        self._shard_layers: list[list[int]] = [[] for _ in plan.shards]
        for index, layer in enumerate(plan.layers):
            self._shard_layers[layer.shard].append(index)
        self._named = [self._is_named(shard) for shard in range(len(plan.shards))]
        for shard in range(len(plan.shards)):
            if not self._named[shard] and not self._part_holds_records(shard):
                journal.forget([i for i in self._shard_layers[shard] if i in journal.records])
        # Layers that a file still lacks.
        self._missing = [
            sum(index not in journal.records for index in layers) for layers in self._shard_layers
        ]
        self._open: dict[int, _OpenLayer] = {}
        self._pending: dict[int, Record] = {}  # finished, not yet in the journal
        self._pending_bytes = 0
        self._committed_at = time.monotonic()
        self._bytes_before = sum(plan.layers[index].layer.stored_bytes for index in journal.records)
        self._num_bytes = sum(layer.layer.stored_bytes for layer in plan.layers)
        self.read_bytes = 0

    def work_off(self) -> bool:
        """Do all that is left; whether nothing is left. Raises as ``Job.run``."""
        num_workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        with Workers(num_workers, Converter(self._plan, self._folder)) as workers:
            try:
                for task, squares in workers.run(self._tasks(), self._stopped):
                    self._note(task, squares)
                    self._report_progress()
                self._commit()
            except BaseException:
                # The layers that are finished stay finished, if the disk allows it.
                with contextlib.suppress(MoechatError, OSError):
                    self._commit()
                raise
        return all(self._named)

    def _tasks(self) -> Iterator[Task]:
        for shard, layers in enumerate(self._shard_layers):
            if self._named[shard]:
                continue
            self._begin_part(shard)
            for index in layers:
                if index in self._journal.records:
                    continue
                tasks = list(self._plan.tasks(index))
                self._open[index] = _OpenLayer(len(tasks))
                if not tasks:  # a tensor without elements
                    self._finish_layer(index)
                yield from tasks
            # Else noted with the last piece that comes back.
            self._name_if_whole(shard)

    def _note(self, task: Task, squares: Squares) -> None:
        layer = self._plan.layers[task.layer_index].layer
        state = self._open[task.layer_index]
        state.squares.append(squares)
        state.tasks_left -= 1
        share = task.end - task.begin
        if task.part is None:
            share = layer.stored_bytes * share // layer.rows
        state.counted_bytes += share
        self.read_bytes += share
        if not state.tasks_left:
            self._finish_layer(task.layer_index)
            overdue = time.monotonic() - self._committed_at > COMMIT_SECONDS
            if overdue or self._pending_bytes >= COMMIT_BYTES:
                self._commit()
            self._name_if_whole(self._plan.layers[task.layer_index].shard)

    def _finish_layer(self, index: int) -> None:
        state = self._open.pop(index)
        stored_bytes = self._plan.layers[index].layer.stored_bytes
        self.read_bytes += stored_bytes - state.counted_bytes
        # fsum: the same sum in whatever order the pieces came back.
        error = math.fsum(squares.error for squares in state.squares)
        total = math.fsum(squares.total for squares in state.squares)
        self._pending[index] = Record(index, error, total)
        self._pending_bytes += stored_bytes
        self._missing[self._plan.layers[index].shard] -= 1

    def _commit(self) -> None:
        """Bring finished layers to disk, then note them."""
        for shard in {self._plan.layers[index].shard for index in self._pending}:
            part = part_path(self._folder, self._plan.shards[shard].name)
            with writing(part):
                file = os.open(part, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        if self._pending:
            self._journal.append(list(self._pending.values()))
        self._pending, self._pending_bytes = {}, 0
        self._committed_at = time.monotonic()

    def _name_if_whole(self, shard: int) -> None:
        if self._named[shard] or self._missing[shard]:
            return
        self._commit()
        name, file_bytes = self._plan.shards[shard].name, self._plan.shards[shard].file_bytes
        part = part_path(self._folder, name)
        if part.stat().st_size != file_bytes:
            raise MoechatError(f"{part} was changed by something else", next_step=RESUME)
        finish_file(self._folder, name)
        self._named[shard] = True

    def _begin_part(self, shard: int) -> None:
        """Make the file with its header, unless it already holds finished layers."""
        if any(index in self._journal.records for index in self._shard_layers[shard]):
            return
        part = part_path(self._folder, self._plan.shards[shard].name)
        with writing(part):
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                write_at(file, part, 0, memoryview(self._plan.shards[shard].header))
            finally:
                os.close(file)

    def _is_named(self, shard: int) -> bool:
        """Whether the file is whole under its own name."""
        path = self._folder / self._plan.shards[shard].name
        whole = path.is_file() and path.stat().st_size == self._plan.shards[shard].file_bytes
        return whole and all(index in self._journal.records for index in self._shard_layers[shard])

    def _part_holds_records(self, shard: int) -> bool:
        """Whether the unfinished file is there, as long as the journal's records need it."""
        part = part_path(self._folder, self._plan.shards[shard].name)
        ends = [
            output.begin_byte + output.num_bytes
            for index in self._shard_layers[shard]
            if index in self._journal.records
            for output in self._plan.layers[index].outputs
        ]
        return part.is_file() and part.stat().st_size >= max(ends, default=0)

    def _report_progress(self) -> None:
        self._on_progress(
            Progress(
                len(self._journal.records) + len(self._pending),
                len(self._plan.layers),
                self._bytes_before + self.read_bytes,
                self._num_bytes,
            )
        )
