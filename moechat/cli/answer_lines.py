"""Lines of prompts in, JSON objects out: what ``batch`` and ``run --batch`` share."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from moechat.cli.interrupt import EXIT_CODE as EXIT_INTERRUPTED
from moechat.cli.interrupt import Interrupt
from moechat.cli.options import DEFAULT_CONCURRENCY

if TYPE_CHECKING:
    from moechat.engine.conversation import Conversation
    from moechat.engine.engine import Engine
    from moechat.sample.params import SamplingParams

EXIT_FAILED_LINES = 6


@dataclasses.dataclass(frozen=True)
class Lines:
    """Where a batch comes from, how many lines are answered at once (None: the default), and how
    the command goes on after an interrupt."""

    source: BinaryIO
    concurrency: int | None
    rest: str = "FILE | moechat run …"


def answer_lines(
    engine: Engine,
    new_conversation: Callable[[], Conversation],
    lines: Lines,
    params: SamplingParams,
    interrupt: Interrupt,
    system: str,
    stats: str,
) -> int:
    """Answer every line on stdout; the exit code. Raises DoesNotFit for too many at once."""
    from moechat.batch.runner import run_batch
    from moechat.terminal.sinks import print_closing

    outcome = run_batch(
        lines.source,
        sys.stdout.buffer,
        [new_conversation() for _ in range(_admitted(engine, lines.concurrency))],
        params,
        interrupt,
        system=system,
        on_finished=lambda event: (
            None
            if stats == "none"
            else print_closing(sys.stderr, event, stats, engine.context_tokens)
        ),
    )
    if outcome.interrupted:
        print(
            f"interrupted after {outcome.num_results} results; the rest begins at line "
            f"{outcome.next_line + 1}: `tail -n +{outcome.next_line + 1} {lines.rest}` "
            f"(its indexes count from 0 again)",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    if outcome.num_failed:
        print(f"{outcome.num_failed} of {outcome.num_results} lines failed", file=sys.stderr)
        return EXIT_FAILED_LINES
    return 0


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
