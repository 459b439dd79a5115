"""The KV policy of an engine: by name, by what the probe allows, or for "auto" by measured rates.

(Design 3.10.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moechat.errors import CheckpointDamaged
from moechat.kv.ladder import Ladder
from moechat.kv.layout import KVLayout
from moechat.kv.policy import KVPolicy, make_policy
from moechat.kv.tiers import budget_bytes_per_token
from moechat.kv.verdict import CAUTIOUS_TIERS, Verdict, fingerprint, load_verdict
from moechat.models.spec import ModelSpec
from moechat.weights.fingerprint import files_fingerprint

if TYPE_CHECKING:
    from moechat.engine.engine import Engine
    from moechat.engine.model_files import ModelFiles

KV_BUDGET = 0.5
_TOKENS = 256  # of the prefill that is timed


def verdict_key(files: ModelFiles) -> str:
    """What the probe's verdict is kept under. Raises CheckpointDamaged."""
    config = files.path / "config.json"
    paths = [*files.weight_files, *([config] if config.is_file() else [])]
    return fingerprint(files_fingerprint(paths))


def known_verdict(files: ModelFiles) -> Verdict | None:
    """What the probe found, if it ever ran on these files and they can be read."""
    try:
        return load_verdict(verdict_key(files))
    except CheckpointDamaged:
        return None


def spectrum_policy(budget: float | None, spec: ModelSpec, verdict: Verdict | None) -> KVPolicy:
    """With the tiers that a verdict allows; without one the cautious two.

    ``budget`` None: KV_BUDGET, or what it takes to drop no token.
    """
    num_tiers = CAUTIOUS_TIERS if verdict is None else verdict.num_tiers
    layout = KVLayout.of(spec)
    if budget is None:
        budget = max(KV_BUDGET, complete_budget(layout, num_tiers))
    return make_policy("spectrum", budget, layout, num_tiers=num_tiers)


def complete_budget(layout: KVLayout, num_tiers: int) -> float:
    """The least budget of spectrum that drops no token, in (0, 1]."""
    lowest_bytes = Ladder.of(layout, num_tiers).cost_bytes[0]
    share = lowest_bytes / budget_bytes_per_token(layout)
    return min(math.nextafter(share, 2), 1.0)  # products with it are rounded down


def named_policy(
    name: str, budget: float | None, spec: ModelSpec, files: ModelFiles | None = None
) -> KVPolicy:
    """The policy of a name, "auto" being native at first. BadParameter as make_policy.

    ``files``: of the model, whose verdict decides on the tiers of spectrum.
    """
    if name == "spectrum":
        return spectrum_policy(budget, spec, None if files is None else known_verdict(files))
    if budget is None:
        budget = KV_BUDGET
    return make_policy("native" if name == "auto" else name, budget, KVLayout.of(spec))


def choose_policy(
    engine: Engine, budget: float | None, link_bytes_per_second: float | None
) -> KVPolicy:
    """Spectrum when the link is the bottleneck, else native. ``None``: shared memory, unmeasured.

    The engine must be open and native; a prefill and the codec are timed once.
    """
    layout = KVLayout.of(engine.spec)
    native = named_policy("native", budget, engine.spec)
    if link_bytes_per_second is None:
        return native
    from moechat.kv.auto import StageRates, measure_codec, pays

    session = engine.session()
    for _ in range(2):  # the first one reads the weights from disk
        session.rewind(0)
        session.extend([0] * min(_TOKENS, engine.context_tokens), logits=None)
    stats = session.last_stats
    session.close()
    spectrum = spectrum_policy(budget, engine.spec, known_verdict(engine.model.files))
    encode, decode = measure_codec(spectrum, engine.compute)
    rates = StageRates(stats.kv_native_bytes / stats.prefill_seconds, encode, decode)
    sent_bytes = spectrum.plan(0, 0, _TOKENS).num_bytes
    share = sent_bytes / (_TOKENS * budget_bytes_per_token(layout))
    native_share = stats.kv_bytes / stats.kv_native_bytes
    return spectrum if pays(rates, link_bytes_per_second, share, native_share) else native
