"""The prefill thread: takes jobs in order, sends KV packets as each layer ends.

First come, first served: a long prompt makes those behind it wait, and each of them is told how
many are before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from moechat.errors import EngineClosed
from moechat.events import Queued
from moechat.kv.channel import Channel
from moechat.prefill.job import PrefillJob
from moechat.prefill.passes import Passes


class PrefillWorker:
    """One thread. Jobs run one after another; each is cancellable between phases of a layer, and at
    once while it waits for its turn."""

    def __init__(self, passes: Passes, channel: Channel[Any]) -> None:
        self._passes, self._channel = passes, channel
        self._closed = False
        self._waiting: deque[PrefillJob] = deque()
        self._busy = False  # a job is under way
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def submit(self, job: PrefillJob) -> None:
        """Queue a job; it is told how many are before it. Raises EngineClosed after close()."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine was closed")
            self._waiting.append(job)
            if ahead := len(self._waiting) - 1 + self._busy:
                job.progress(Queued(ahead=ahead))
            self._changed.notify_all()

    def drop_cancelled(self) -> None:
        """End cancelled jobs that wait for their turn; from any thread."""
        with self._changed:
            dropped = []
            for job in tuple(self._waiting):
                # The collector may cancel another request right here, and call this once more.
                if job.cancel.raised and job in self._waiting:
                    self._waiting.remove(job)
                    dropped.append(job)
            if dropped:
                self._tell_waiting()
        for job in dropped:
            self._channel.send(job.failed(None))

    def close(self) -> None:
        """Let queued jobs end, then the thread. Cancel them first to be quick."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join()

    def _tell_waiting(self) -> None:
        for ahead, job in enumerate(tuple(self._waiting), int(self._busy)):
            if ahead:
                job.progress(Queued(ahead=ahead))

    def _next(self) -> PrefillJob | None:
        """The job whose turn it is; None once the worker is closed and all are done."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
            if not self._waiting:
                return None
            self._busy = True
            job = self._waiting.popleft()
            self._tell_waiting()
        job.result.queued_seconds = time.perf_counter() - job.submitted_seconds
        return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._serve(job)
            del job  # its cache and logits are not to live until the next one comes
        self._passes.close()

    def _serve(self, job: PrefillJob) -> None:
        try:
            complete = self._passes.run(job)
        except Exception as error:  # reported to whoever waits for the job
            self._channel.send(job.failed(error))
            return
        self._channel.send(job.then(job.result) if complete else job.failed(None))
