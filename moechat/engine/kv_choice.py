"""The KV policy of an engine: by name, or for "auto" by measured rates (design 3.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moechat.kv.layout import KVLayout
from moechat.kv.policy import KVPolicy, make_policy
from moechat.models.spec import ModelSpec

if TYPE_CHECKING:
    from moechat.engine.engine import Engine

_TOKENS = 256  # of the prefill that is timed


def named_policy(name: str, budget: float, spec: ModelSpec) -> KVPolicy:
    """The policy of a name, "auto" being native at first. BadParameter as make_policy."""
    return make_policy("native" if name == "auto" else name, budget, KVLayout.of(spec))


def choose_policy(engine: Engine, budget: float, link_bytes_per_second: float | None) -> KVPolicy:
    """Spectrum when the link is the bottleneck, else native. ``None``: shared memory, unmeasured.

    The engine must be open and native; a prefill and the codec are timed once.
    """
    layout = KVLayout.of(engine.spec)
    native = make_policy("native", budget, layout)
    if link_bytes_per_second is None:
        return native
    from moechat.kv.auto import StageRates, measure_codec, pays

    session = engine.session()
    for _ in range(2):  # the first one reads the weights from disk
        session.rewind(0)
        session.extend([0] * min(_TOKENS, engine.context_tokens), logits=None)
    stats = session.last_stats
    session.close()
    spectrum = make_policy("spectrum", budget, layout)
    encode, decode = measure_codec(spectrum, engine.compute)
    rates = StageRates(stats.kv_native_bytes / stats.prefill_seconds, encode, decode)
    return spectrum if pays(rates, link_bytes_per_second, budget) else native
