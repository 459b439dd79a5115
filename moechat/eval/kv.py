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
from moechat.eval.progress import Progress
from moechat.kv.policy import KVPolicy
from moechat.models.spec import LatentAttention

Show = Callable[[str], None]


@dataclass(slots=True)
class Row:
    """What is known of one policy: a likelihood for each window, a result for each needle."""

    policy: Policy
    windows: list[Likelihood] = field(default_factory=list)
    needles: list[Result] = field(default_factory=list)
    crossings: list[Traffic] = field(default_factory=list)  # of both, one after the other

    @property
    def traffic(self) -> Traffic:
        """Of all crossings together."""
        return sum(self.crossings, Traffic())

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
    chosen = _suitable(engine, policies, notes)
    session = engine.session()
    work = sum(map(len, windows)) + sum(trial.length_tokens for trial in trials)
    progress = Progress(len(chosen) * work)
    for place, (policy, made) in enumerate(chosen, 1):
        name = f"policy {place} of {len(chosen)}, {policy.label}"
        engine.kv_policy = made
        row = Row(policy)
        rows.append(row)
        for number, ids in enumerate(windows, 1):
            show(f"{name}: window {number} of {len(windows)}{progress.left}")
            crossing = len(ids) - 1 - scored_tokens
            cross(session, ids[:crossing])
            row.crossings.append(last_traffic(session))
            row.windows.append(score(session, ids[crossing:]))
            progress.add(len(ids))
        for number, trial in enumerate(trials, 1):
            show(f"{name}: needle {number} of {len(trials)}{progress.left}")
            cross(session, trial.document_ids)
            row.crossings.append(last_traffic(session))
            row.needles.append(ask(session, engine.text, trial))
            progress.add(trial.length_tokens)
    session.close()


def _suitable(
    engine: Engine, policies: Iterable[Policy], notes: list[str]
) -> list[tuple[Policy, KVPolicy]]:
    """Those that can code this model's KV; a note, once a name, for the others."""
    found: list[tuple[Policy, KVPolicy]] = []
    left_out: dict[str, str] = {}
    for policy in policies:
        try:
            made = policy.make(engine.spec)
            made.tiers(0, 0, 1)
        except ValueError as error:
            why = getattr(error, "why", "") or str(error)
            if "values" in why and isinstance(engine.spec.attention, LatentAttention):
                why += ", and latent attention has none"
            left_out[policy.name] = why
        else:
            found.append((policy, made))
    notes += [f"{name} is left out: {why}" for name, why in left_out.items()]
    return found
