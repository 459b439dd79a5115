"""Answers batch lines one after the other, each as a conversation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from moechat.batch.lines import encode_result, parse_line, read_lines
from moechat.errors import MoechatError
from moechat.events import Event, Finished
from moechat.messages import Turn
from moechat.sample.params import SamplingParams


class Answering(Protocol):
    """What a batch needs of a conversation; ``engine.conversation.Conversation`` is one."""

    def ask_messages(self, messages: list[Turn], params: SamplingParams) -> Iterator[Event]:
        """The events of the answer to a whole given talk."""

    def clear(self) -> None:
        """Forget all turns and what the KV cache holds."""

    def cancel(self) -> None:
        """End the answer that is under way. Callable from any thread."""


class Interruption(Protocol):
    """What a batch needs to know of Ctrl-C."""

    @property
    def requested(self) -> bool:
        """Whether the user has asked to stop."""

    def cancels(self, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """While it is open a request calls ``cancel``; otherwise it raises KeyboardInterrupt."""


@dataclass
class BatchOutcome:
    """How far a batch came. ``next_line`` counts from 0: the first line without a result."""

    num_results: int = 0
    num_failed: int = 0
    next_line: int = 0
    interrupted: bool = False


def run_batch(
    source: BinaryIO,
    sink: BinaryIO,
    conversation: Answering,
    params: SamplingParams,
    interruption: Interruption,
    *,
    system: str = "",
    on_finished: Callable[[Finished], None] = lambda event: None,
) -> BatchOutcome:
    """Write one JSON object for each line of ``source`` that is not blank, in order, flushed.

    A line that fails gives an error object and the batch goes on. An interrupted line gives
    nothing. Raises OSError when ``sink`` cannot be written.
    """
    outcome = BatchOutcome()
    try:
        for index, line in enumerate(read_lines(source)):
            result = _answer(line, conversation, params, interruption, system, on_finished)
            if interruption.requested:
                outcome.interrupted = True
                break
            # Nothing raises in here, so that what is written and what is counted agree.
            with interruption.cancels(_nothing):
                if result is not None:
                    sink.write(encode_result({"index": index, **result}))
                    sink.flush()
                    outcome.num_results += 1
                    outcome.num_failed += "error" in result
                outcome.next_line = index + 1
            if interruption.requested:
                outcome.interrupted = True
                break
    except KeyboardInterrupt:
        # Only outside `cancels`: while waiting for a line, or between two.
        outcome.interrupted = True
    return outcome


def _nothing() -> None:
    """A request to stop that the loop itself will notice."""


def _answer(
    line: bytes | None,
    conversation: Answering,
    params: SamplingParams,
    interruption: Interruption,
    system: str,
    on_finished: Callable[[Finished], None],
) -> dict[str, Any] | None:
    """What to print for one line besides its index; None for a blank or interrupted one."""
    try:
        turns = parse_line(line, system)
        if turns is None:
            return None
        # Not even the cache of the line before: a line's answer must not depend on its neighbours.
        conversation.clear()
        # Ctrl-C in here raises; once events come it cancels.
        events = conversation.ask_messages(turns, params)
        text: list[str] = []
        reasoning: list[str] = []
        last: Event | None = None
        with interruption.cancels(conversation.cancel):
            for last in events:
                text.append(last.text)
                reasoning.append(last.reasoning)
        if not isinstance(last, Finished):
            raise RuntimeError("the engine ended without a finish reason")
        on_finished(last)
        return _result("".join(text), "".join(reasoning), last)
    except MoechatError as error:
        return {"error": {"name": error.name, "message": error.message}}
    except OSError:
        raise
    except Exception as error:
        # A fault of moechat's own: the other lines still deserve their answers.
        message = f"{type(error).__name__}: {error}"
        return {"error": {"name": "internal-error", "message": message}}


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
