"""What one KV slot consists of: the parts that the codec scales, and the policy counts, apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moechat.models.spec import LatentAttention, ModelSpec

Kind = Literal["key", "value", "latent", "rotary"]


@dataclass(frozen=True)
class Part:
    """``width`` elements of a slot from ``begin`` on; each quantised part has a scale a token."""

    begin: int
    width: int
    kind: Kind


@dataclass(frozen=True)
class KVLayout:
    """All parts of a slot, in order and without gaps. ValueError otherwise."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        end = 0
        for part in self.parts:
            if part.begin != end or part.width < 1:
                raise ValueError("the parts of a KV slot must follow one another")
            end += part.width
        if not self.parts:
            raise ValueError("a KV slot has at least one part")

    @classmethod
    def of(cls, spec: ModelSpec) -> KVLayout:
        """A key of each head, then a value of each head; or the latent, then the rotary key."""
        attention = spec.attention
        if isinstance(attention, LatentAttention):
            latent = attention.kv_lora_rank
            return cls((Part(0, latent, "latent"), Part(latent, attention.rope_dim, "rotary")))
        heads, dim = attention.num_kv_heads, attention.head_dim
        keys = tuple(Part(i * dim, dim, "key") for i in range(heads))
        return cls(keys + tuple(Part((heads + i) * dim, dim, "value") for i in range(heads)))

    @property
    def width(self) -> int:
        """Elements of a slot."""
        return self.parts[-1].begin + self.parts[-1].width

    @property
    def centred_width(self) -> int:
        """Elements, from the first on, that ``centre_keys`` centres: all that act as keys."""
        width = 0
        for part in self.parts:
            if part.kind == "value":
                break
            width += part.width
        return width
