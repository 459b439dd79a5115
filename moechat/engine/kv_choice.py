"""The KV policy of an engine: by name, by what the probe allows, or for "auto" by measured rates.

(Design 3.10.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moechat.kv.layout import KVLayout
from moechat.kv.policy import KVPolicy, make_policy
from moechat.kv.verdict import CAUTIOUS_TIERS, Verdict, fingerprint, load_verdict
from moechat.models.spec import ModelSpec

if TYPE_CHECKING:
    from moechat.engine.engine import Engine
    from moechat.engine.model_files import ModelFiles

_TOKENS = 256  # of the prefill that is timed


def model_fingerprint(files: ModelFiles) -> str:
    """What the probe's verdict is kept under."""
    config = files.path / "config.json"
    return fingerprint([*files.weight_files, *([config] if config.is_file() else [])])


def known_verdict(files: ModelFiles) -> Verdict | None:
    """What the probe found, if it ever ran on these files."""
    return load_verdict(model_fingerprint(files))


def spectrum_policy(budget: float, spec: ModelSpec, verdict: Verdict | None) -> KVPolicy:
    """With the tiers that a verdict allows; without one the cautious two."""
    num_tiers = CAUTIOUS_TIERS if verdict is None else verdict.num_tiers
    return make_policy("spectrum", budget, KVLayout.of(spec), num_tiers=num_tiers)


def named_policy(
    name: str, budget: float, spec: ModelSpec, files: ModelFiles | None = None
) -> KVPolicy:
    """The policy of a name, "auto" being native at first. BadParameter as make_policy.

    ``files``: of the model, whose verdict decides on the tiers of spectrum.
    """
    if name == "spectrum":
        return spectrum_policy(budget, spec, None if files is None else known_verdict(files))
    return make_policy("native" if name == "auto" else name, budget, KVLayout.of(spec))


def choose_policy(engine: Engine, budget: float, link_bytes_per_second: float | None) -> KVPolicy:
    """Spectrum when the link is the bottleneck, else native. ``None``: shared memory, unmeasured.

    The engine must be open and native; a prefill and the codec are timed once.
    """
    native = make_policy("native", budget, KVLayout.of(engine.spec))
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
    return spectrum if pays(rates, link_bytes_per_second, budget) else native
