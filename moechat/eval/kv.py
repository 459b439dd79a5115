"""Every KV policy on the same texts: perplexity, needles, and the bytes that it moved.

Perplexity: a window's first tokens cross, the last ``scored_tokens`` are predicted from what
arrived. One engine serves all policies in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moechat.engine.engine import Engine
from moechat.eval.crossing import Traffic, cross, last_traffic, score
from moechat.eval.likelihood import Likelihood
from moechat.eval.needle import Result, Trial, ask
from moechat.eval.policies import Policy

Show = Callable[[str], None]


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


def measure_policies(
    engine: Engine,
    policies: Iterable[Policy],
    windows: Sequence[Sequence[int]],
    scored_tokens: int,
    trials: Sequence[Trial],
    rows: list[Row],
    notes: list[str],
    show: Show,
) -> None:
    """Append to ``rows``. ``windows``: ids, of which the last is only predicted.

    A policy that cannot code this model's KV is left out, with a note.
    """
    session = engine.session()
    for policy in policies:
        try:
            made = policy.make(engine.spec)
            made.tiers(0, 0, 1)
        except ValueError as error:
            notes.append(f"{policy.label} is left out: {error}")
            continue
        engine.kv_policy = made
        row = Row(policy)
        rows.append(row)
        for number, ids in enumerate(windows, 1):
            show(f"{policy.label}: text window {number} of {len(windows)}")
            crossing = len(ids) - 1 - scored_tokens
            cross(session, ids[:crossing])
            row.traffic += last_traffic(session)
            row.windows.append(score(session, ids[crossing:]))
        for number, trial in enumerate(trials, 1):
            show(
                f"{policy.label}: needle {number} of {len(trials)}, in "
                f"{trial.length_tokens:,} tokens"
            )
            cross(session, trial.document_ids)
            row.traffic += last_traffic(session)
            row.needles.append(ask(session, engine.text, trial))
    session.close()
