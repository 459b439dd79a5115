"""Every KV policy on the same texts: perplexity, needles, and the bytes that it moved.

Perplexity: a window's first tokens cross, the last ``scored_tokens`` are predicted from what
arrived. One engine a policy; the mapped weights are the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moechat.engine.engine import Engine
from moechat.errors import BadParameter
from moechat.eval.crossing import Traffic, cross, score
from moechat.eval.likelihood import Likelihood
from moechat.eval.needle import Result, Trial, ask
from moechat.eval.policies import Policy

Show = Callable[[str], None]
Open = Callable[[Policy], Engine]


@dataclass(slots=True)
class Row:
    """What is known of one policy: a likelihood for each window, a result for each needle."""

    policy: Policy
    windows: list[Likelihood] = field(default_factory=list)
    needles: list[Result] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)  # of both

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self.windows and not self.needles


@dataclass(slots=True)
class Table:
    """What is known so far; rows come in the order of ``measure_policies``' policies."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_policies(
    policies: Sequence[Policy],
    open_engine: Open,
    windows: Sequence[Sequence[int]],
    scored_tokens: int,
    trials: Sequence[Trial],
    table: Table,
    show: Show,
) -> None:
    """Fill ``table``. ``windows``: ids, of which the last is only predicted.

    A policy that an engine refuses (it may not suit a model) is left out, with a note.
    """
    for policy in policies:
        show(f"{policy.label}: opening the model")
        try:
            engine = open_engine(policy)
        except BadParameter as error:
            table.notes.append(f"{policy.label} is left out: {error.message}")
            continue
        row = Row(policy)
        table.rows.append(row)
        with engine:
            _measure(engine, row, windows, scored_tokens, trials, show)


def _measure(
    engine: Engine,
    row: Row,
    windows: Sequence[Sequence[int]],
    scored_tokens: int,
    trials: Sequence[Trial],
    show: Show,
) -> None:
    session = engine.session()
    for number, ids in enumerate(windows, 1):
        show(f"{row.policy.label}: text window {number} of {len(windows)}")
        crossing = len(ids) - 1 - scored_tokens
        traffic = cross(session, ids[:crossing], ids[crossing])
        row.windows.append(score(session, ids[crossing:]))
        row.traffic += traffic
    for number, trial in enumerate(trials, 1):
        show(
            f"{row.policy.label}: needle {number} of {len(trials)}, in "
            f"{trial.length_tokens:,} tokens"
        )
        result = ask(session, engine.text, trial)
        row.needles.append(result)
        row.traffic += result.traffic
    session.close()
