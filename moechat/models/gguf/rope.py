"""Rotary embedding as GGUF metadata has it."""

from __future__ import annotations

import math
from typing import NamedTuple

from moechat.errors import ArchitectureUnsupported
from moechat.models.bounds import HIGHEST_THETA, LOWEST_THETA, MAX_TOKENS
from moechat.models.config_reader import ConfigReader
from moechat.models.gguf.traits import GGUFSource, Traits
from moechat.models.rope import Linear, Scaling, Yarn, inverse_frequencies
from moechat.models.spec import Rope

FACTORS_NAME = "rope_freqs.weight"


class Ropes(NamedTuple):
    """``ropes[of_windows]`` is that of layers with a window, ``ropes[0]`` that of the others.

    The softmax scale is multiplied by ``softmax_factor``.
    """

    ropes: tuple[Rope, ...]
    of_windows: int
    softmax_factor: float
    context_tokens: int


def read_ropes(
    read: ConfigReader, source: GGUFSource, traits: Traits, dims: int, has_windows: bool
) -> Ropes:
    """Frequencies for ``dims`` rotated dimensions. Raises ArchitectureUnsupported."""
    trained = read.integer("context_length", 1, MAX_TOKENS)
    theta = read.number("rope.freq_base", LOWEST_THETA, HIGHEST_THETA, default=10_000.0)
    scaling = _scaling(read, traits, trained)
    rope = _rope(dims, theta, scaling, traits)
    if FACTORS_NAME in source.tensors and traits.rope_factors:
        rope = _divided(rope, source)
    ropes = [rope]
    window_theta = read.number(
        "rope.freq_base_swa", 0.0, HIGHEST_THETA, default=traits.window_theta
    )
    if has_windows and window_theta:
        window_scaling = None if traits.window_theta else scaling
        ropes.append(_rope(dims, max(window_theta, LOWEST_THETA), window_scaling, traits))
    context_tokens, softmax_factor = trained, 1.0
    if isinstance(scaling, Yarn):
        # Files of models that YaRN stretches may still state what they were trained with.
        stretched = int(scaling.factor * scaling.original_context_tokens)
        context_tokens = min(max(trained, stretched), MAX_TOKENS)
        softmax_factor = scaling.softmax_factor
    return Ropes(tuple(ropes), len(ropes) - 1, softmax_factor, context_tokens)


def _rope(dims: int, theta: float, scaling: Scaling | None, traits: Traits) -> Rope:
    return Rope(
        inverse_frequencies=inverse_frequencies(dims, theta, scaling),
        amplitude=scaling.amplitude if isinstance(scaling, Yarn) else 1.0,
        interleaved=traits.interleaved,
    )


def _scaling(read: ConfigReader, traits: Traits, trained: int) -> Scaling | None:
    kind = read.text("rope.scaling.type") or "linear"
    read.only("rope.scaling.type", "none", "linear", "yarn")
    old_factor = read.number("rope.scale_linear", 0.0, 1e6, default=0.0)
    factor = read.number("rope.scaling.factor", 0.0, 1e6, default=old_factor) or 1.0
    original = read.integer("rope.scaling.original_context_length", 1, MAX_TOKENS, default=trained)
    read.only("rope.scaling.attn_factor", 1.0)
    read.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    if factor < 1.0:
        raise read.unsupported("rope.scaling.factor", "it must be at least 1")
    log_multiplier = read.number("rope.scaling.yarn_log_multiplier", 0.0, 10.0, default=0.0)
    attention_factor = read.number("rope.scaling.yarn_attn_factor", 0.0, 1e3, default=0.0)
    beta_fast = read.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0)
    beta_slow = read.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0)
    if kind == "linear" and factor != 1.0:
        return Linear(factor=factor)
    if kind != "yarn":
        return None
    if beta_fast < beta_slow:
        raise read.unsupported("rope.scaling.yarn_beta_fast", "it must not be below yarn_beta_slow")
    grown = 1.0 + 0.1 * math.log(factor)
    # DeepSeek's rule: cos and sin times mscale / mscale_all_dim, which are equal in all its models;
    # the file has 0.1 mscale_all_dim.
    latent_factor = 1.0 + log_multiplier * math.log(factor)
    if not traits.latent and log_multiplier:
        raise read.unsupported("rope.scaling.yarn_log_multiplier", "only deepseek2 may have it")
    return Yarn(
        factor=factor,
        original_context_tokens=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=traits.truncated_yarn,
        amplitude=attention_factor or (1.0 if log_multiplier else grown),
        softmax_factor=latent_factor**2 if traits.latent else 1.0,
    )


def _divided(rope: Rope, source: GGUFSource) -> Rope:
    """Frequencies divided by the file's factors, by which Llama 3.1's scaling is stored."""
    tensor = source.tensors[FACTORS_NAME]
    what = f"{tensor.file} holds {FACTORS_NAME} that cannot be used"
    plain = rope.inverse_frequencies
    if tensor.dtype != "F32" or tensor.shape != (len(plain),):
        raise ArchitectureUnsupported(
            what, f"it is {tensor.dtype} {list(tensor.shape)}, not F32 [{len(plain)}]"
        )
    factors = [float(factor) for factor in tensor.array]
    if not all(1e-6 < factor < 1e6 for factor in factors):  # NaN compares false
        raise ArchitectureUnsupported(what, "its factors are no positive numbers")
    frequencies = tuple(frequency / factor for frequency, factor in zip(plain, factors))
    return Rope(
        inverse_frequencies=frequencies, amplitude=rope.amplitude, interleaved=rope.interleaved
    )
