"""From settings to output: progress, what Ctrl-C leaves, JSON, text, picture.

Text and JSON go to stdout, progress to stderr when that is a terminal. Ctrl-C ends a measurement;
what is there by then is told, and the report says that it was interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moechat.bench.drawing import check_plot_path
from moechat.bench.status_line import Show, StatusLine
from moechat.bench.table import Text, print_text
from moechat.engine.engine import Engine
from moechat.errors import Usage
from moechat.eval import report
from moechat.eval.kv import Table, measure_policies
from moechat.eval.needle import (
    Result,
    Trial,
    ask,
    built_in_sentences,
    depths_percent,
    make_trials,
    sentences_of,
)
from moechat.eval.picture import quality_over_bytes
from moechat.eval.policies import Policy
from moechat.eval.ppl import Perplexity, measure_perplexity
from moechat.eval.settings import NeedleSettings, check_window
from moechat.eval.texts import Source, encode_stream, read_source, windows

EXIT_INTERRUPTED = 130
_NOT_ENDED = "interrupted: these are the figures so far"


class Outcome:
    """How a measurement went, for the report."""

    def __init__(self) -> None:
        self.interrupted = False
        self.seconds = 0.0
        self.notes: list[str] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time what is inside; Ctrl-C ends it and is remembered."""
        began = time.monotonic()
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.insert(0, _NOT_ENDED)
        self.seconds = time.monotonic() - began

    def keys(self) -> dict[str, Any]:
        """What every report ends with."""
        return {
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
        }


def run_ppl(
    model: str, path: Path, *, window: int, limit: int | None, threads: int | None, as_json: bool
) -> int:
    """``eval ppl MODEL FILE``; the exit code. Raises MoechatError."""
    source = read_source(path)
    found, outcome = Perplexity(), Outcome()
    with StatusLine(sys.stderr) as line:
        line.show(f"opening {model}")
        with Engine.open(model, threads=threads) as engine:
            with outcome.measuring():
                measure_perplexity(engine, source, window, limit, found, line.show)
            content = report.frame("ppl", engine) | {"file": str(path), "window_tokens": window}
    if not found.windows:
        return EXIT_INTERRUPTED
    content |= report.ppl_report(found) | outcome.keys()
    return _output(content, as_json, report.ppl_text)


def run_needle(
    model: str,
    settings: NeedleSettings,
    *,
    text: Path | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """``eval needle MODEL``; the exit code. Raises MoechatError."""
    source = None if text is None else read_source(text)
    outcome = Outcome()
    results: list[Result] = []
    with StatusLine(sys.stderr) as line:
        line.show(f"opening {model}")
        with Engine.open(model, threads=threads) as engine:
            with outcome.measuring():
                _ask_all(engine, _trials(engine, settings, source, line.show), results, line.show)
            content = report.frame("needle", engine)
    if not results:
        return EXIT_INTERRUPTED
    content |= {
        "depths": settings.depths,
        "seed": settings.seed,
        "needles": report.needle_rows(results),
        **outcome.keys(),
    }
    return _output(content, as_json, report.needle_text)


def _ask_all(
    engine: Engine, trials: Sequence[Trial], results: list[Result], show: Show
) -> None:
    session = engine.session()
    for number, trial in enumerate(trials, 1):
        show(f"needle {number} of {len(trials)}, in {trial.length_tokens:,} tokens")
        results.append(ask(session, engine.text, trial))


def run_kv(
    model: str,
    policies: Sequence[Policy],
    settings: NeedleSettings,
    *,
    text: Path | None,
    window: int,
    scored: int,
    limit: int,
    threads: int | None,
    as_json: bool,
    plot: Path | None,
    open_engine: Callable[..., Engine] = Engine.open,
) -> int:
    """``eval kv MODEL``; the exit code. Raises MoechatError."""
    if plot is not None:
        check_plot_path(plot)
    source = None if text is None else read_source(text)
    table, outcome = Table(), Outcome()
    with StatusLine(sys.stderr) as line:
        line.show(f"opening {model}")
        with open_engine(model, threads=threads) as engine:
            content = report.frame("kv", engine)
            pieces: list[list[int]] = []
            if source is None:
                table.notes.append("perplexity was not measured: --text names a text for it")
            else:
                pieces = _windows(engine, source, window, scored, limit)
            with outcome.measuring():
                trials = _trials(engine, settings, source, line.show) if settings.depths else []
        if not (pieces or trials):
            raise Usage("there is nothing to measure", "there are neither needles nor a --text")
        with outcome.measuring():
            measure_policies(
                policies,
                lambda policy: open_engine(model, threads=threads, **policy.settings),
                pieces,
                scored,
                trials,
                table,
                line.show,
            )
    rows = report.kv_rows(table.rows)
    if not rows and outcome.interrupted:
        return EXIT_INTERRUPTED
    outcome.notes += table.notes
    content |= {
        "text": None if text is None else str(text),
        "window_tokens": window,
        "scored_tokens": scored,
        "windows": len(pieces),
        "depths": settings.depths,
        "seed": settings.seed,
        "rows": rows,
        **outcome.keys(),
    }
    code = _output(content, as_json, report.kv_text)
    if plot is not None and rows:
        quality_over_bytes(content).write(plot)
    return code


def _windows(
    engine: Engine, source: Source, window: int, scored: int, limit: int
) -> list[list[int]]:
    check_window(window, scored, engine.context_tokens)
    ids, lead = encode_stream(source, engine.text)
    found = windows(ids, lead, window, full=True)[:limit]
    if not found:
        raise Usage(
            "--text is too short", f"it has {len(ids):,} tokens, and a window {window:,} and one"
        )
    return found


def _trials(
    engine: Engine, settings: NeedleSettings, source: Source | None, show: Show
) -> list[Trial]:
    show("writing the texts for the needles")
    sentences = built_in_sentences() if source is None else sentences_of(_prose(source))
    lengths = settings.lengths_within(engine.context_tokens)
    depths = depths_percent(settings.depths)
    return list(make_trials(engine.text, lengths, depths, sentences, settings.seed))


def _prose(source: Source) -> str:
    """A text, or what was replied in chats."""
    replies = (
        turn.text for turns in source.conversations for turn in turns if turn.role == "assistant"
    )
    return source.text or "\n".join(replies)


def _output(content: dict[str, Any], as_json: bool, text: Callable[[dict[str, Any]], Text]) -> int:
    if as_json:
        print(json.dumps(content, indent=2), flush=True)
    else:
        print_text(text(content), sys.stdout)
    return EXIT_INTERRUPTED if content["interrupted"] else 0
