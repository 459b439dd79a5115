"""The probe: does a model bear INT4 KV? Needles at the harshest setting, and the logits' KL.

Three texts with a needle cross once with native KV and once with nearly every token in INT4. Each
is asked for its needle. Then the text goes on for some hundred tokens with its own sentences in
another order, which a model predicts by reading what crossed; there the logits are compared. All
needles found: INT4 is allowed. Native KV comes first: a model that misses needles with it proves
nothing by missing some, and the verdict says so; it is then not allowed either.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moechat.engine.engine import Engine
from moechat.engine.kv_choice import complete_budget
from moechat.engine.session import Session
from moechat.errors import Usage
from moechat.eval.crossing import cross
from moechat.eval.likelihood import PIECE_ROWS, log_softmax
from moechat.eval.needle import ANSWER_TOKENS, Trial, ask, built_in_sentences, make_trials
from moechat.eval.progress import Progress
from moechat.kv.layout import KVLayout
from moechat.kv.policy import KVPolicy, best_num_tiers, make_policy
from moechat.kv.verdict import CAUTIOUS_TIERS, Verdict

BUDGET = 0.3
DEPTHS_PERCENT = (10.0, 50.0, 90.0)
DOCUMENT_TOKENS, SCORED_TOKENS = 2000, 340  # of each trial, where the context has room

Show = Callable[[str], None]


def probe(engine: Engine, show: Show) -> Verdict:
    """Run it; ``show`` gets a line before each step. The engine's policy is as before afterwards.

    Raises TextUnavailable for a model without text, Usage for a context too short.
    """
    text = engine.text
    length, scored = _lengths(engine)
    sentences = built_in_sentences()
    trials = list(make_trials(text, (length,), DEPTHS_PERCENT, sentences, seed=0))
    layout = KVLayout.of(engine.spec)
    native, harsh = make_policy("native", 1.0, layout), harshest_policy(layout)
    found: dict[str, list[bool]] = {native.name: [], harsh.name: []}
    kl_nats, kl_tokens = 0.0, 0
    step, steps = 0, 2 * len(trials)
    progress = Progress(steps)
    before, session = engine.kv_policy, engine.session()
    try:
        for number, trial in enumerate(trials, 1):
            order = random.Random(trial.code).sample(sentences, len(sentences))
            next_ids = text.tokenizer.encode(f" {' '.join(order)}")[:scored]
            logits: list[NDArray[np.float32]] = []
            for policy, kind in ((native, "native KV"), (harsh, "INT4")):
                step += 1
                show(
                    f"KV probe: step {step} of {steps}, needle {number} of {len(trials)}, "
                    f"{kind}{progress.left}"
                )
                engine.kv_policy = policy
                is_found, logits_TV = _try(session, trial, next_ids)
                found[policy.name].append(is_found)
                logits.append(logits_TV)
                progress.add(1)
            kl_nats += divergence_nats(*logits)
            kl_tokens += len(next_ids)
    finally:
        engine.kv_policy = before
        session.close()
    passed = all(found[harsh.name])
    return Verdict(
        num_tiers=best_num_tiers(layout) if passed else CAUTIOUS_TIERS,
        trials=tuple(found[harsh.name]),
        native_trials=tuple(found[native.name]),
        kl_nats=max(kl_nats / kl_tokens, 0.0),
        kl_tokens=kl_tokens,
        date=datetime.date.today().isoformat(),
    )


def harshest_policy(layout: KVLayout) -> KVPolicy:
    """Three tiers at the smallest budget that drops no token, but not below BUDGET.

    A needle that was dropped would tell nothing about INT4.
    """
    budget = max(BUDGET, complete_budget(layout, num_tiers=3))
    return make_policy("spectrum", budget, layout, num_tiers=3)


def divergence_nats(native_TV: NDArray[np.float32], other_TV: NDArray[np.float32]) -> float:
    """Kullback-Leibler divergence from native to other, summed over the tokens; in float64."""
    total = 0.0
    for begin in range(0, len(native_TV), PIECE_ROWS):
        native = log_softmax(native_TV[begin : begin + PIECE_ROWS])
        other = log_softmax(other_TV[begin : begin + PIECE_ROWS])
        total += float(np.sum(np.exp(native) * (native - other)))
    return total


def _lengths(engine: Engine) -> tuple[int, int]:
    """Tokens of a text with its question, and of what follows it."""
    wanted = DOCUMENT_TOKENS + SCORED_TOKENS
    context, trained = engine.context_tokens, engine.trained_context_tokens
    if context < min(wanted, trained):
        raise Usage(
            "the context is too short for the KV probe",
            f"it has {context:,} tokens; {min(wanted, trained):,} are needed",
        )
    scored = min(SCORED_TOKENS, context // 4)
    return min(DOCUMENT_TOKENS, context - max(scored, ANSWER_TOKENS)), scored


def _try(
    session: Session, trial: Trial, next_ids: Sequence[int]
) -> tuple[bool, NDArray[np.float32]]:
    """Whether the needle is found, and the logits of ``next_ids`` behind the same text.

    The question comes first: it is short, so that sliding windows still hold what they need.
    """
    cross(session, trial.document_ids)
    is_found = ask(session, session.engine.text, trial).found
    session.rewind(len(trial.document_ids))
    logits_TV = session.extend(next_ids)
    assert logits_TV is not None
    return is_found, logits_TV
