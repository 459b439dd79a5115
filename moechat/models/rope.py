"""Rotary embedding: what config.json says of it, and the frequencies. Float64 throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moechat.models.bounds import HIGHEST_THETA, LOWEST_THETA, MAX_TOKENS
from moechat.models.config_reader import ConfigReader
from moechat.models.spec import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1's rule: slow pairs are divided by ``factor``, fast ones kept, others blended."""

    factor: float
    low_turns: float
    high_turns: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071). ``softmax_factor`` is DeepSeek's own addition, 1 elsewhere."""

    factor: float
    original_context_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    softmax_factor: float = 1.0


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Base, scaling, and the share of each head that is rotated."""

    theta: float
    scaling: Scaling | None = None
    rotated_share: float = 1.0

    def rope(self, head_dim: int, *, interleaved: bool = False) -> Rope:
        """The frequencies for heads of ``head_dim``; ``rotated_share`` of it is rotated."""
        dims = int(head_dim * self.rotated_share)
        return Rope(
            inverse_frequencies=inverse_frequencies(dims, self.theta, self.scaling),
            amplitude=self.scaling.amplitude if isinstance(self.scaling, Yarn) else 1.0,
            interleaved=interleaved,
        )

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek's rules multiply the softmax scale by."""
        return self.scaling.softmax_factor if isinstance(self.scaling, Yarn) else 1.0

    def context_tokens(self, trained: int) -> int:
        """``trained`` positions, or what YaRN stretches its original context to, if that is more.

        Model cards add YaRN to config.json without raising max_position_embeddings.
        """
        if not isinstance(self.scaling, Yarn):
            return trained
        stretched = int(self.scaling.factor * self.scaling.original_context_tokens)
        return min(max(trained, stretched), MAX_TOKENS)


def read_rope(
    read: ConfigReader,
    *,
    theta: float | None = None,
    rotated_share: float | None = None,
    latent: bool = False,
) -> RopeSettings:
    """From rope_theta and rope_scaling, or from the newer rope_parameters.

    ``theta`` and ``rotated_share`` are the family's defaults; without the latter whole heads are
    rotated. ``latent``: YaRN with DeepSeek's mscale rules. Raises ArchitectureUnsupported.
    """
    old, new = read.section("rope_scaling"), read.section("rope_parameters")
    if old is not None and new is not None:
        raise read.unsupported("rope_scaling", "rope_parameters says it a second time")
    section = new or old or ConfigReader({})
    return read_rope_section(read, section, theta, rotated_share, latent)


def read_rope_section(
    read: ConfigReader,
    section: ConfigReader,
    theta: float | None,
    rotated_share: float | None = None,
    latent: bool = False,
) -> RopeSettings:
    """As read_rope, with the object that holds the scaling given."""
    base = _either(read, section, "rope_theta", LOWEST_THETA, HIGHEST_THETA, theta)
    low = 1.0 if rotated_share is None else 1e-3
    share = _either(read, section, "partial_rotary_factor", low, 1.0, rotated_share or 1.0)
    scaling = read_scaling(section, latent)
    return RopeSettings(theta=base, scaling=scaling, rotated_share=share)


def read_scaling(section: ConfigReader, latent: bool = False) -> Scaling | None:
    """The scaling that a rope_scaling object describes; every key of it must be understood."""
    kinds = {section.text("rope_type"), section.text("type")} - {None}
    kind = kinds.pop() if kinds else "default"
    key = "rope_type" if section.has("rope_type") else "type"
    if kinds:
        raise section.unsupported(key, "type says something else")
    if not section.has(key) and section.has("factor"):
        raise section.unsupported("rope_type", "a factor needs one")
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = Linear(factor=_factor(section))
    elif kind == "dynamic" and _factor(section) == 1.0:
        pass  # its base grows with the context by factor, which is 1
    elif kind == "llama3":
        scaling = _llama3(section)
    elif kind == "yarn":
        scaling = _yarn(section, latent)
    elif kind != "default":
        implemented = "'default', 'linear', 'llama3' and 'yarn'"
        raise section.unsupported(key, f"only {implemented} are implemented")
    section.finish()
    return scaling


def inverse_frequencies(
    dims: int, theta: float, scaling: Scaling | None = None
) -> tuple[float, ...]:
    """Radians a position of each of the ``dims / 2`` pairs."""
    plain = [theta ** (-2 * pair / dims) for pair in range(dims // 2)]
    if isinstance(scaling, Linear):
        return tuple(frequency / scaling.factor for frequency in plain)
    if isinstance(scaling, Llama3):
        return tuple(_llama3_frequency(frequency, scaling) for frequency in plain)
    if isinstance(scaling, Yarn):
        return _yarn_frequencies(plain, theta, scaling)
    return tuple(plain)


def _llama3_frequency(frequency: float, scaling: Llama3) -> float:
    turns = scaling.original_context_tokens * frequency / (2 * math.pi)
    kept = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    kept = min(max(kept, 0.0), 1.0)
    return frequency * kept + frequency / scaling.factor * (1.0 - kept)


def _yarn_frequencies(plain: list[float], theta: float, yarn: Yarn) -> tuple[float, ...]:
    """Fast pairs (over ``beta_fast`` turns within the original context) kept, slow ones divided.

    Between ``beta_fast`` and ``beta_slow`` turns it blends linearly by pair index.
    """
    dims = 2 * len(plain)

    def pair_with_turns(turns: float) -> float:
        positions_a_turn = yarn.original_context_tokens / (turns * 2 * math.pi)
        return dims * math.log(positions_a_turn) / (2 * math.log(theta))

    first, last = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound is dims - 1, although pairs end at dims / 2: so the reference has it.
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first if last != first else 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        slow = min(max((pair - first) / width, 0.0), 1.0)
        scaled.append(frequency * (1.0 - slow) + frequency / yarn.factor * slow)
    return tuple(scaled)


def _llama3(section: ConfigReader) -> Llama3:
    low = section.number("low_freq_factor", 1e-3, 1e6)
    high = section.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise section.unsupported("high_freq_factor", f"it must be above low_freq_factor {low}")
    return Llama3(
        factor=_factor(section),
        low_turns=low,
        high_turns=high,
        original_context_tokens=_original_context_tokens(section),
    )


def _yarn(section: ConfigReader, latent: bool) -> Yarn:
    """DeepSeek's code and the general rule differ in what cos, sin and the scores are scaled by."""
    factor = _factor(section)
    beta_fast = section.number("beta_fast", 1e-3, 1e6, default=32.0)
    beta_slow = section.number("beta_slow", 1e-3, 1e6, default=1.0)
    if beta_fast < beta_slow:
        raise section.unsupported("beta_fast", f"it must not be below beta_slow {beta_slow}")
    mscale = section.number("mscale", 0.0, 100.0, default=1.0 if latent else 0.0)
    mscale_all_dim = section.number("mscale_all_dim", 0.0, 100.0, default=0.0)
    amplitude = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    truncate = True
    if latent:
        section.only("truncate", True)
    else:
        if (mscale > 0.0) != (mscale_all_dim > 0.0):
            raise section.unsupported("mscale", "mscale_all_dim must come with it")
        truncate = section.boolean("truncate", default=True)
        rule = amplitude if mscale else _mscale(factor, 1.0)
        amplitude = section.number("attention_factor", 1e-3, 1e3, default=rule)
    return Yarn(
        factor=factor,
        original_context_tokens=_original_context_tokens(section),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        amplitude=amplitude,
        softmax_factor=_mscale(factor, mscale_all_dim) ** 2 if latent else 1.0,
    )


def _either(
    read: ConfigReader,
    section: ConfigReader,
    key: str,
    low: float,
    high: float,
    default: float | None,
) -> float:
    """A number that stands beside the section, inside it, or in both alike."""
    if not section.has(key):
        return read.number(key, low, high, **({} if default is None else {"default": default}))
    inner = section.number(key, low, high)
    if read.number(key, low, high, default=inner) != inner:
        raise read.unsupported(key, f"the rope section says {inner}")
    return inner


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _factor(section: ConfigReader) -> float:
    return section.number("factor", 1.0, 1e6)


def _original_context_tokens(section: ConfigReader) -> int:
    return section.integer("original_max_position_embeddings", 1, MAX_TOKENS)
