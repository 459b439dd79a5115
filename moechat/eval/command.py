"""From settings to output: progress, JSON, text, picture.

Text and JSON go to stdout, progress to stderr. Ctrl-C ends a measurement; what is there by then is
told, and the report says that it was interrupted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moechat.bench.drawing import check_plot_path
from moechat.bench.status_line import Show, StatusLine
from moechat.bench.table import Text, print_text
from moechat.engine.engine import Engine
from moechat.engine.kv_choice import (
    complete_budget,
    known_verdict,
    spectrum_policy,
    verdict_key,
)
from moechat.errors import MoechatError, Usage
from moechat.eval import report
from moechat.eval.crossing import cross
from moechat.eval.kv import Row, measure_policies
from moechat.eval.needle import (
    Result,
    Trial,
    ask,
    built_in_sentences,
    depths_percent,
    make_trials,
    sentences_of,
)
from moechat.eval.outcome import EXIT_INTERRUPTED, Outcome
from moechat.eval.picture import quality_over_bytes, write_picture
from moechat.eval.policies import Policy
from moechat.eval.ppl import Perplexity, measure_perplexity
from moechat.eval.probe import probe
from moechat.eval.progress import Progress
from moechat.eval.settings import NeedleSettings, ScoringSettings
from moechat.eval.texts import Source, encode_stream, read_source, windows
from moechat.kv.layout import KVLayout
from moechat.kv.verdict import CAUTIOUS_TIERS, Verdict, store_verdict, verdict_damage

_NO_TEXT = "perplexity is not measured: --text names a text for it"


def run_ppl(
    model: str,
    path: Path,
    *,
    window: int | None,
    limit: int | None,
    threads: int | None,
    device: str = "cpu",
    as_json: bool,
) -> int:
    """``eval ppl MODEL FILE``; the exit code. Raises MoechatError."""
    found = Perplexity()
    with StatusLine(sys.stderr) as line, Outcome(line) as outcome:
        source = read_source(path)
        line.show(f"opening {model}")
        with _open(model, threads, device) as engine:
            with outcome.measuring():
                measure_perplexity(engine, source, window, limit, found, line.show)
            content = report.frame("ppl", engine) | report.reader(engine)
        _end(outcome, bool(found.windows))
        content |= {"file": str(path), "window_tokens": found.window_tokens}
        content |= report.ppl_report(found) | outcome.keys()
        return _output(content, as_json, report.ppl_text)


def run_needle(
    model: str, needles: NeedleSettings, *, threads: int | None, as_json: bool, device: str = "cpu"
) -> int:
    """``eval needle MODEL``; the exit code. Raises MoechatError."""
    results: list[Result] = []
    with StatusLine(sys.stderr) as line, Outcome(line) as outcome:
        sentences = _sentences(needles)
        line.show(f"opening {model}")
        with _open(model, threads, device) as engine:
            content = report.frame("needle", engine)
            trials = _trials(engine, needles, sentences, line.show)
            with outcome.measuring():
                _ask_all(engine, trials, results, line.show)
            content |= report.reader(engine)
        _end(outcome, bool(results))
        content |= {**needles.keys(), "needles": report.needle_rows(results), **outcome.keys()}
        return _output(content, as_json, report.needle_text)


def _ask_all(engine: Engine, trials: Sequence[Trial], results: list[Result], show: Show) -> None:
    session = engine.session()
    progress = Progress(sum(trial.length_tokens for trial in trials))
    for number, trial in enumerate(trials, 1):
        tokens = trial.length_tokens
        show(f"needle {number} of {len(trials)}, in {tokens:,} tokens{progress.left}")
        cross(session, trial.document_ids)
        results.append(ask(session, engine.text, trial))
        progress.add(tokens)
    session.close()


def run_kv(
    model: str,
    policies: Sequence[Policy],
    needles: NeedleSettings,
    scoring: ScoringSettings,
    *,
    threads: int | None,
    device: str = "cpu",
    as_json: bool,
    plot: Path | None,
) -> int:
    """``eval kv MODEL``; the exit code. Raises MoechatError."""
    if plot is not None:
        check_plot_path(plot)
    if scoring.text is None and not needles.depths:
        raise Usage("there is nothing to measure", "there are neither needles nor a --text")
    table: list[Row] = []
    with StatusLine(sys.stderr) as line, Outcome(line) as outcome:
        source = None if scoring.text is None else read_source(scoring.text)
        sentences = _sentences(needles)
        if source is None:
            outcome.notes.append(_NO_TEXT)
            if sys.stderr.isatty():  # before minutes of waiting; the report has it anyway
                line.say(_NO_TEXT)
        line.show(f"opening {model}")
        with _open(model, threads, device) as engine:
            content = report.frame("kv", engine)
            line.show("preparing the text")
            pieces = [] if source is None else _windows(engine, source, scoring)
            trials = _trials(engine, needles, sentences, line.show)
            with outcome.measuring():
                measure_policies(
                    engine,
                    policies,
                    pieces,
                    scoring.scored_tokens,
                    trials,
                    table,
                    outcome.notes,
                    line.show,
                )
            content |= report.reader(engine)
        rows = report.kv_rows(table)
        _end(outcome, bool(rows) or not outcome.interrupted)
        content |= {**scoring.keys(), **needles.keys(), "rows": rows, **outcome.keys()}
        code = _output(content, as_json, report.kv_text)
        if plot is not None and rows:
            write_picture(quality_over_bytes(content), plot)
        return code


def run_probe(model: str, *, threads: int | None, as_json: bool, device: str = "cpu") -> int:
    """``eval probe MODEL``; the exit code. Raises MoechatError."""
    verdict = None
    with StatusLine(sys.stderr) as line, Outcome(line) as outcome:
        line.show(f"opening {model}")
        with _open(model, threads, device) as engine:
            content = report.frame("probe", engine)
            with outcome.measuring():
                verdict = probe(engine, line.show)
            content |= report.reader(engine)
            _end(outcome, verdict is not None)
            assert verdict is not None
            if why := store_verdict(verdict_key(engine.model.files), verdict):
                outcome.notes.append(f"the verdict could not be kept: {why}")
        content |= verdict.keys() | {"conclusive": verdict.conclusive} | outcome.keys()
        return _output(content, as_json, lambda _: [*report.heading(content), verdict.text])


def _open(model: str, threads: int | None, device: str) -> Engine:
    """On a GPU that was named all is read there, whatever would be sooner."""
    least = None if device in ("cpu", "auto") else 0
    return Engine.open(model, threads=threads, device=device, gpu_prefill_tokens=least)


def _end(outcome: Outcome, has_figures: bool) -> None:
    """Nothing is shown any more; without figures there is nothing to report either."""
    outcome.blank_line()
    if outcome.interrupted and not has_figures:
        raise KeyboardInterrupt


def settle_tiers(engine: Engine, budget: float | None) -> None:
    """Give an engine the spectrum policy that its model bears; probe it first if nobody did.

    Ctrl-C, or a model that cannot be probed: the cautious tiers, and a line that says so.
    """
    verdict = known_verdict(engine.model.files)
    if verdict is None:
        with StatusLine(sys.stderr) as line:
            if why := verdict_damage(verdict_key(engine.model.files)):
                line.say(f"KV probe: what it found before is of no use: {why}")
            verdict = _first_probe(engine, line)
            if verdict is None or verdict.num_tiers == CAUTIOUS_TIERS:
                _say_what_drops(KVLayout.of(engine.spec), budget, line)
    engine.kv_policy = spectrum_policy(budget, engine.spec, verdict)


def _first_probe(engine: Engine, line: StatusLine) -> Verdict | None:
    line.say("KV probe: what precision this model needs is measured once (Ctrl-C: not now)")
    try:
        verdict = probe(engine, line.show)
    except (KeyboardInterrupt, MoechatError) as error:
        why = error.what if isinstance(error, MoechatError) else "interrupted"
        line.say(f"KV probe: {why}; two tiers of precision are used, without INT4")
        return None
    line.say(f"KV probe: {verdict.text}")
    if why := store_verdict(verdict_key(engine.model.files), verdict):
        line.say(f"KV probe: the verdict could not be kept, every start probes again: {why}")
    return verdict


def _say_what_drops(layout: KVLayout, budget: float | None, line: StatusLine) -> None:
    """A budget that was asked for may be too small for all tokens without INT4."""
    least = complete_budget(layout, CAUTIOUS_TIERS)
    if budget is not None and budget < least:
        enough = min(math.ceil(100 * least) / 100, 1)
        line.say(f"KV probe: --kv-budget {budget:g} now drops tokens; {enough:g} drops none")


def _windows(engine: Engine, source: Source, scoring: ScoringSettings) -> list[list[int]]:
    """The windows to score. Raises Usage when there is none."""
    length = scoring.window_within(engine.context_tokens)
    ids, lead = encode_stream(source, engine.text)
    found = windows(ids, lead, length, full=True)[: scoring.windows]
    if not found:
        raise Usage(
            "the text is too short", f"it has {len(ids):,} tokens; a window needs {length + 1:,}"
        )
    return found


def _trials(
    engine: Engine, needles: NeedleSettings, sentences: Sequence[str], show: Show
) -> list[Trial]:
    if not needles.depths:
        return []
    lengths = needles.lengths_within(engine.context_tokens)
    depths = depths_percent(needles.depths)
    found: list[Trial] = []
    for trial in make_trials(engine.text, lengths, depths, sentences, needles.seed):
        found.append(trial)
        show(f"preparing text {len(found)} of {len(lengths) * len(depths)}")
    return found


def _sentences(needles: NeedleSettings) -> list[str]:
    """Of the filler that was named, in chats of the replies; or those of the program."""
    if needles.filler is None:
        return built_in_sentences()
    source = read_source(needles.filler)
    replies = (
        turn.text for turns in source.conversations for turn in turns if turn.role == "assistant"
    )
    return sentences_of(source.text or "\n".join(replies))


def _output(content: dict[str, Any], as_json: bool, text: Callable[[dict[str, Any]], Text]) -> int:
    if as_json:
        print(json.dumps(content, indent=2), flush=True)
    else:
        print_text(text(content), sys.stdout)
    return EXIT_INTERRUPTED if content["interrupted"] else 0
