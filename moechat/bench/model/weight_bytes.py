"""Weight bytes that decoding one token reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.engine.model_files import find_model_files
from moechat.models.spec import BoundTensor, ModelSpec


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Of one token, at batch 1: each of the chosen experts once, everything else once.

    ``routed``: the chosen experts, in all layers. ``head``: the output matrix. ``total``: all.
    """

    routed: int
    head: int
    total: int


def token_bytes(
    stored: Iterable[tuple[str, int]],
    *,
    experts: int,
    chosen: int,
    vocab: int,
    tied: bool,
) -> TokenBytes:
    """From role and stored bytes (scales included) of every tensor.

    Of the embedding a token reads one row; when it is the head too, all of it.
    """
    routed = head = other = embedding = 0
    for role, num_bytes in stored:
        if ".experts." in role:
            routed += num_bytes
        elif role == "embedding":
            embedding += num_bytes
        elif role == "head":
            head += num_bytes
        else:
            other += num_bytes
    routed = routed * chosen // experts if experts else 0
    head = embedding if tied else head
    return TokenBytes(routed, head, routed + head + other + embedding // vocab)


def of_files(path: Path) -> TokenBytes:
    """Of a model folder or GGUF file, from the parts that the engine would bind."""
    files = find_model_files(path)
    try:
        spec = files.spec
        return token_bytes(_stored(files.bind()), **counts(spec))
    finally:
        files.close()


def counts(spec: ModelSpec) -> dict[str, Any]:
    """What token_bytes must know of a model besides its tensors."""
    return {
        "experts": spec.moe.num_experts if spec.moe else 0,
        "chosen": spec.moe.num_experts_per_token if spec.moe else 0,
        "vocab": spec.vocab_size,
        "tied": spec.tied_embeddings,
    }


def _stored(tensors: Iterable[BoundTensor]) -> Iterator[tuple[str, int]]:
    for tensor in tensors:
        parts = (tensor.data, tensor.scale, tensor.zeros, tensor.group_index)
        # The length of the view: of GGUF blocks the shape counts elements.
        yield (
            tensor.spec.role,
            sum(
                math.prod(part.array.shape) * part.array.itemsize
                for part in parts
                if part is not None
            ),
        )
