"""config.json of Gemma 3 (text) as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.bounds import HIGHEST_THETA, LOWEST_THETA
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, num_layers, sliding_layers, window_size
from moechat.models.gemma import softcap, with_gemma_scales
from moechat.models.rope import RopeSettings, read_rope, read_rope_section
from moechat.models.spec import LayerSpec, ModelSpec

_PATTERN = 6  # of files without the key: every sixth layer is full
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_FULL_ROPE, _LOCAL_ROPE = 0, 1


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "gemma3_text")
    read.only("attn_logit_softcapping")
    window = window_size(read)
    slides = _sliding_layers(read)
    full, local = _ropes(read)
    spec = grouped_spec(read, generation, "gemma3", rope=full, tied=True)
    head_dim = 2 * len(spec.ropes[0].inverse_frequencies)
    return replace(
        with_gemma_scales(read, spec),
        ropes=(spec.ropes[0], local.rope(head_dim)),
        layers=tuple(
            LayerSpec(window=window, rope=_LOCAL_ROPE) if slide else LayerSpec(rope=_FULL_ROPE)
            for slide in slides
        ),
        final_softcap=softcap(read, "final_logit_softcapping", absent=0.0),
    )


def _sliding_layers(read: ConfigReader) -> tuple[bool, ...]:
    read.alias("_sliding_window_pattern", "sliding_window_pattern")
    pattern = read.integer("sliding_window_pattern", 1, 1024, default=_PATTERN)
    by_pattern = tuple((layer + 1) % pattern != 0 for layer in range(num_layers(read)))
    slides = sliding_layers(read, by_pattern)
    if read.has("sliding_window_pattern") and slides != by_pattern:
        raise read.unsupported("layer_types", f"sliding_window_pattern says {pattern}")
    return slides


def _ropes(read: ConfigReader) -> tuple[RopeSettings, RopeSettings]:
    """The ropes of full and of sliding layers; rope_parameters may hold one object for each."""
    parameters = read.section("rope_parameters")
    if parameters is None:
        local = read.number(
            "rope_local_base_freq", LOWEST_THETA, HIGHEST_THETA, default=_LOCAL_THETA
        )
        return read_rope(read, theta=_THETA), RopeSettings(theta=local)
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        if read.has(key):
            raise read.unsupported(key, "rope_parameters says it a second time")
    ropes = []
    for kind, theta in (("full_attention", _THETA), ("sliding_attention", _LOCAL_THETA)):
        section = parameters.section(kind) or ConfigReader({})
        ropes.append(read_rope_section(ConfigReader({}), section, theta))
    parameters.finish()
    return ropes[0], ropes[1]
