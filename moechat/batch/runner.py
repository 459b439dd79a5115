"""Answers batch lines, several at a time, each as a conversation of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from moechat.batch.lines import decode_line, encode_result, names_of, read_lines, turns_of
from moechat.batch.progress import Progress
from moechat.errors import MoechatError
from moechat.events import Event, Finished
from moechat.messages import Turn
from moechat.sample.params import SamplingParams

_MAX_UNWRITTEN = 256  # results that may wait for a slow line before them


class Answering(Protocol):
    """What a batch needs of a conversation; ``engine.conversation.Conversation`` is one."""

    def ask_messages(self, messages: list[Turn], params: SamplingParams) -> Iterator[Event]:
        """The events of the answer to a whole given talk."""

    def clear(self) -> None:
        """Forget all turns and what the KV cache holds."""

    def cancel(self) -> None:
        """End the answer that is under way. Callable from any thread."""


class Interruption(Protocol):
    """What a batch needs to know of Ctrl-C, which raises KeyboardInterrupt in the main thread."""

    @property
    def requested(self) -> bool:
        """Whether the user has asked to stop."""


@dataclass
class BatchOutcome:
    """How far a batch came. ``next_line`` counts from 0: the first line without a result."""

    num_results: int = 0
    num_failed: int = 0
    next_line: int = 0
    interrupted: bool = False


@dataclass(frozen=True)
class _Answered:
    """What to print for one line besides its index (None: nothing), and how its answer ended."""

    result: dict[str, Any] | None = None
    finished: Finished | None = None


def run_batch(
    source: BinaryIO,
    sink: BinaryIO,
    conversations: Sequence[Answering],
    params: SamplingParams,
    interruption: Interruption,
    *,
    system: str = "",
    progress: Progress | None = None,
    on_change: Callable[[], None] = lambda: None,
    on_finished: Callable[[int, Finished], None] = lambda index, event: None,
) -> BatchOutcome:
    """Write one JSON object for each line of ``source`` that is not blank, in order, flushed.

    Each of ``conversations`` answers a line at a time, in a thread of its own; a line is read when
    one of them is idle. A result waits for those of the lines before it. A line that fails gives an
    error object and the batch goes on. After an interrupt nothing more is written, so that what is
    there are the results of all lines before ``next_line``. Raises OSError when ``sink`` cannot be
    written.

    ``progress`` counts what is done; after each token and each line ``on_change`` is called, by any
    of the threads. ``on_finished`` gets an answer's index and end when its result is due, in order.
    """
    tell = _Telling(progress or Progress(), on_change, on_finished)
    batch = _Batch(sink, conversations, params, interruption, system, tell)
    with ThreadPoolExecutor(len(conversations), "batch") as threads:
        try:
            for index, line in enumerate(read_lines(source)):
                threads.submit(batch.answer, batch.take(), index, line)
                if not batch.wait(num_idle=1):
                    break
            batch.wait(num_idle=len(conversations))
        except KeyboardInterrupt:
            batch.outcome.interrupted = True
        finally:
            batch.stop()
    if batch.error is not None:
        raise batch.error
    batch.outcome.interrupted |= interruption.requested
    return batch.outcome


@dataclass(frozen=True)
class _Telling:
    progress: Progress
    on_change: Callable[[], None]
    on_finished: Callable[[int, Finished], None]


class _Batch:
    """The lines under way. Everything happens under one lock but the answering itself."""

    def __init__(
        self,
        sink: BinaryIO,
        conversations: Sequence[Answering],
        params: SamplingParams,
        interruption: Interruption,
        system: str,
        tell: _Telling,
    ) -> None:
        self.outcome = BatchOutcome()
        self.error: BaseException | None = None  # that ends the batch
        self._sink, self._params, self._system = sink, params, system
        self._interruption, self._tell = interruption, tell
        self._idle, self._busy = list(conversations), list[Answering]()
        self._unwritten: dict[int, _Answered] = {}
        self._stopping = False
        self._changed = threading.Condition()

    def wait(self, num_idle: int) -> bool:
        """Until so many conversations are idle; whether the batch goes on."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._over()
                    or (len(self._idle) >= num_idle and len(self._unwritten) < _MAX_UNWRITTEN)
                )
            )
            return not self._over()

    def take(self) -> Answering:
        """An idle conversation, for ``answer``."""
        with self._changed:
            conversation = self._idle.pop(0)
            self._busy.append(conversation)
            return conversation

    def stop(self) -> None:
        """Cancel what is under way."""
        with self._changed:
            self._stopping = True
            busy = list(self._busy)
        for conversation in busy:
            conversation.cancel()

    def answer(self, conversation: Answering, index: int, line: bytes | None) -> None:
        """Answer a line and write what is due; the work of one thread."""
        answered, error = _Answered(), None
        try:
            if not self._over():
                answered = self._answer(conversation, line)
        except BaseException as failure:  # raised again by run_batch
            error = failure
        with self._changed:
            self._busy = [other for other in self._busy if other is not conversation]
            self._idle.append(conversation)
            self.error = self.error or error
            if not self._over():
                self._unwritten[index] = answered
                try:
                    self._write()
                except BaseException as failure:
                    self.error = failure
            self._changed.notify_all()
        self._tell.on_change()

    def _over(self) -> bool:
        return self._stopping or self.error is not None or self._interruption.requested

    def _write(self) -> None:
        while not self._over() and self.outcome.next_line in self._unwritten:
            answered = self._unwritten.pop(self.outcome.next_line)
            if answered.finished is not None:
                self._tell.on_finished(self.outcome.next_line, answered.finished)
            if answered.result is not None:
                row = {"index": self.outcome.next_line, **answered.result}
                self._sink.write(encode_result(row))
                self._sink.flush()
                self.outcome.num_results += 1
                self.outcome.num_failed += "error" in answered.result
            self.outcome.next_line += 1

    def _answer(self, conversation: Answering, line: bytes | None) -> _Answered:
        progress, names = self._tell.progress, dict[str, Any]()
        try:
            content = decode_line(line)
            if content is None:
                progress.done()
                return _Answered()
            names = names_of(content)
            turns = turns_of(content, self._system)
            result, finished = self._ask(conversation, turns)
            progress.done()
            return _Answered(names | result, finished)
        except MoechatError as error:
            failure = {"name": error.name, "message": error.message}
        except OSError:
            raise
        except Exception as error:
            # A fault of moechat's own: the other lines still deserve their answers.
            message = f"{type(error).__name__}: {error}"
            failure = {"name": "internal-error", "message": message}
        progress.failed()
        return _Answered({**names, "error": failure})

    def _ask(self, conversation: Answering, turns: list[Turn]) -> tuple[dict[str, Any], Finished]:
        # Not even the cache of the line before: an answer must not depend on its neighbours.
        conversation.clear()
        events = conversation.ask_messages(turns, self._params)
        if self._over():  # stop() may have come before there was something to cancel
            conversation.cancel()
        text: list[str] = []
        reasoning: list[str] = []
        last: Event | None = None
        for last in events:
            text.append(last.text)
            reasoning.append(last.reasoning)
            if last.token_id is not None:
                self._tell.progress.token()
                self._tell.on_change()
        if not isinstance(last, Finished):
            raise RuntimeError("the engine ended without a finish reason")
        return _result("".join(text), "".join(reasoning), last), last


def _result(text: str, reasoning: str, finished: Finished) -> dict[str, Any]:
    """What a complete answer gives; the fields of thinking only where there was some."""
    stats = finished.stats
    result: dict[str, Any] = {"text": text}
    if reasoning:
        result["reasoning"] = reasoning
    result["finish_reason"] = finished.finish_reason
    result["usage"] = {
        "prompt_tokens": stats.new_prompt_tokens + stats.cached_prompt_tokens,
        "completion_tokens": stats.decode_tokens,
        "cached_tokens": stats.cached_prompt_tokens,
    }
    if stats.reasoning_tokens:
        result["usage"]["reasoning_tokens"] = stats.reasoning_tokens
    return result
