"""Several devices in one prefill: who has which tokens, and a host thread for each.

Shapes: T tokens of a span, N lanes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch  # type: ignore[import-not-found, unused-ignore]

Result = TypeVar("Result")


class LaneStopped(RuntimeError):
    """Another lane failed, so that what this one waits for never comes."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a lane: where they are in the span, and among the lane's own."""

    span: slice
    own: slice

    def __len__(self) -> int:
        count: int = self.span.stop - self.span.start
        return count


def zigzag(num_tokens: int, num_lanes: int) -> list[list[Chunk]]:
    """The tokens of each lane, in their order; [0, T) for one lane, none for some of few tokens.

    The span is cut into 2 N pieces, and lane d has numbers d and 2 N - 1 - d: of the causal
    attention each lane then has the same share.
    """
    bounds = [num_tokens * i // (2 * num_lanes) for i in range(2 * num_lanes + 1)]
    lanes = []
    for lane in range(num_lanes):
        chunks: list[Chunk] = []
        for piece in (lane, 2 * num_lanes - 1 - lane):
            begin, end = bounds[piece], bounds[piece + 1]
            own = chunks[-1].own.stop if chunks else 0
            if chunks and chunks[-1].span.stop == begin:  # the last lane's two meet
                first = chunks.pop()
                chunks.append(Chunk(slice(first.span.start, end), slice(0, own + end - begin)))
            elif begin < end:
                chunks.append(Chunk(slice(begin, end), slice(own, own + end - begin)))
        lanes.append(chunks)
    return lanes


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device for kernels and streams of this thread that name none; nothing off CUDA."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = torch.cuda.device(device)
    return guard


@functools.cache
def _thread(lane: int) -> ThreadPoolExecutor:
    """A lane's thread, kept: libraries make a thread's handles at its first call on a device, which
    took 0.1 s a layer."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"moechat-lane-{lane}")


os.register_at_fork(after_in_child=_thread.cache_clear)  # threads stay in the parent


def run_lanes(tasks: Sequence[Callable[[], Result]], stop: Callable[[], None]) -> list[Result]:
    """The results of all tasks, each run on a thread of its own, the first on the caller's.

    ``stop`` is called when one fails, and has to make those that wait for it raise LaneStopped.
    Returns or raises when all have ended; raises the first lane's error that is not LaneStopped.
    """
    results: list[Result | None] = [None] * len(tasks)
    errors: list[BaseException | None] = [None] * len(tasks)

    def run(number: int) -> None:
        try:
            results[number] = tasks[number]()
        except BaseException as error:  # raised below, on the caller's thread
            errors[number] = error
            stop()

    others = []
    try:
        for number in range(1, len(tasks)):
            others.append(_thread(number).submit(run, number))
        run(0)
    except BaseException:  # no more threads, or the interpreter ends
        stop()
        raise
    finally:
        for other in others:
            other.result()
    failed = [error for error in errors if error is not None]
    for error in failed:
        if not isinstance(error, LaneStopped):
            raise error
    if failed:
        raise failed[0]
    return results  # type: ignore[return-value]  # all are there
