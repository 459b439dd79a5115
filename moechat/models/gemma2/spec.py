"""config.json of Gemma 2 as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, num_layers, sliding_layers, window_size
from moechat.models.gemma import softcap, with_gemma_scales
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "gemma2")
    read.alias("sliding_window_size", "sliding_window")
    window = window_size(read)
    slides = sliding_layers(read, [layer % 2 == 0 for layer in range(num_layers(read))])
    spec = grouped_spec(
        read,
        generation,
        "gemma2",
        rope=read_rope(read),
        windows=[window if slide else 0 for slide in slides],
        tied=True,
    )
    return replace(
        with_gemma_scales(read, spec),
        attention_softcap=softcap(read, "attn_logit_softcapping", absent=50.0),
        final_softcap=softcap(read, "final_logit_softcapping", absent=30.0),
    )
