"""Lines of prompts in, JSON objects out: what ``batch`` and ``run --batch`` share."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from moechat.cli.interrupt import EXIT_CODE as EXIT_INTERRUPTED
from moechat.cli.interrupt import Interrupt
from moechat.cli.options import DEFAULT_CONCURRENCY
from moechat.terminal_size import fold_words

if TYPE_CHECKING:
    from moechat.batch.runner import BatchOutcome
    from moechat.engine.conversation import Conversation
    from moechat.engine.engine import Engine
    from moechat.events import Finished
    from moechat.sample.params import SamplingParams

EXIT_FAILED_LINES = 6


_SHOWN_EVERY_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Lines:
    """Where a batch comes from, how many lines are answered at once (None: the default), and how
    the command goes on after an interrupt."""

    source: BinaryIO
    concurrency: int | None
    rest: str = "FILE | moechat run …"


class Watch:
    """What stderr hears of a batch. Callable from any thread while it is entered."""

    def __init__(
        self, source: BinaryIO, stats: str, context_tokens: int, kv_budget: float | None
    ) -> None:
        from moechat.batch.progress import Progress, count_lines
        from moechat.bench.status_line import StatusLine

        self._stats, self._context_tokens, self._kv_budget = stats, context_tokens, kv_budget
        # Where the results themselves are seen to come, a line between them would be in the way.
        self._shows = sys.stderr.isatty() and not sys.stdout.isatty()
        self._line = StatusLine(sys.stderr)
        self._lock, self._shown_at = threading.Lock(), 0.0
        self.progress = Progress(count_lines(source) if self._shows else None)
        self._num_noted, self._note = 0, ""

    def __enter__(self) -> Watch:
        self._line.__enter__()
        self.show()
        return self

    def __exit__(self, *exception: object) -> None:
        self._line.__exit__(*exception)

    def show(self) -> None:
        """Say how far the batch is, on a terminal, now and then."""
        if not self._shows:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._shown_at >= _SHOWN_EVERY_SECONDS:
                self._shown_at = now
                self._line.show(self.progress.text())

    def finished(self, index: int, finished: Finished) -> None:
        """Print the counters of an answer, if they are wanted."""
        from moechat.terminal.stats_text import cut_note, kv_note, stats_json, stats_line

        if note := kv_note(finished, self._kv_budget, counted=self._stats == "line"):
            self._num_noted, self._note = self._num_noted + 1, self._note or note
        if self._stats == "json":
            self._say(stats_json(finished, index))
        elif self._stats == "line":
            note = cut_note(finished, self._context_tokens, has_text=True)
            self._say(
                f"[{'; '.join(filter(None, [f'index {index}', stats_line(finished), note]))}]"
            )

    def close(self, outcome: BatchOutcome) -> None:
        """Say what came out of it; nothing may be shown after that."""
        self._shows = False
        counts = outcome.num_results, outcome.num_failed
        if self._stats == "json":
            self._say(self.progress.summary_json(*counts))
            return
        if self._num_noted:
            noun = "line" if self._num_noted == 1 else "lines"
            self._say(f"KV of {self._num_noted:,} {noun}, such as the first of them: {self._note}")
        if self._stats != "none":
            self._say(self.progress.summary(*counts))
        elif outcome.num_failed and not outcome.interrupted:
            self._say(f"{outcome.num_failed} of {outcome.num_results} lines failed")

    def _say(self, line: str) -> None:
        with self._lock:  # no other thread may show something between erasing and writing
            self._line.erase()
            # JSON stays on one line.
            line = line if self._stats == "json" else fold_words(line, sys.stderr)
            print(line, file=sys.stderr, flush=True)


def answer_lines(
    engine: Engine,
    new_conversation: Callable[[], Conversation],
    lines: Lines,
    params: SamplingParams,
    interrupt: Interrupt,
    system: str,
    stats: str,
    kv_budget: float | None = None,
) -> int:
    """Answer every line on stdout; the exit code. Raises DoesNotFit for too many at once.

    ``stats``: "summary" at the end, or besides it "line" or "json" for each answer; or "none".
    """
    from moechat.batch.runner import run_batch

    conversations = [new_conversation() for _ in range(_admitted(engine, lines.concurrency))]
    with Watch(lines.source, stats, engine.context_tokens, kv_budget) as watch:
        outcome = run_batch(
            lines.source,
            sys.stdout.buffer,
            conversations,
            params,
            interrupt,
            system=system,
            progress=watch.progress,
            on_change=watch.show,
            on_finished=watch.finished,
        )
        watch.close(outcome)
    if outcome.interrupted:
        print(
            f"interrupted after {outcome.num_results} results; the rest begins at line "
            f"{outcome.next_line + 1}: `tail -n +{outcome.next_line + 1} {lines.rest}` "
            f"(its indexes count from 0 again)",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    return EXIT_FAILED_LINES if outcome.num_failed else 0


def _admitted(engine: Engine, wanted: int | None) -> int:
    """How many conversations there may be at once; fewer than the default are told on stderr."""
    if wanted is not None:
        engine.admit(wanted)
        return wanted
    fit = engine.sessions_that_fit()
    if fit is None or fit >= DEFAULT_CONCURRENCY:
        return DEFAULT_CONCURRENCY
    engine.admit(1)
    print(f"{fit} lines at once: no more conversations fit the memory", file=sys.stderr)
    return fit
