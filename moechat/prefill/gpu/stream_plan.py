"""How a GPU's memory is shared between the weights that stream through it and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.errors import DoesNotFit
from moechat.gpu_weights.stored import StoredWeights
from moechat.models.spec import BoundTensor, ModelSpec
from moechat.prefill.gpu.activations import activation_bytes
from moechat.prefill.gpu.budget import fit_settings, least_bytes
from moechat.prefill.gpu.plan import StreamSettings

RESERVE_BYTES = 1 << 30  # of a GPU, for the driver, libraries and whatever shows the screen
LEAST_TOKENS = 256
_DTYPES = {"bf16": torch.bfloat16, "w8a8": torch.bfloat16, "exact": torch.float32}


def free_memory_bytes(devices: Sequence[str]) -> int | None:
    """What may be taken of each device: what is free of the fullest, less a reserve.

    None: without a limit, as of torch's CPU device.
    """
    if all(name == "cpu" for name in devices):
        return None
    torch.cuda.empty_cache()  # what an engine before this one has left to torch
    free = [int(torch.cuda.mem_get_info(name)[0]) for name in devices]
    return max(0, min(free) - RESERVE_BYTES)


def least_memory_bytes(
    spec: ModelSpec,
    weights: StoredWeights,
    *,
    compute: str,
    context_tokens: int,
    chunk_tokens: int,
) -> int:
    """With so much of each device ``plan_stream`` finds a plan, if only just."""
    few = min(LEAST_TOKENS, context_tokens)
    dtype = _DTYPES[compute]
    activations = activation_bytes(
        spec, few, chunk_tokens, prefix_tokens=context_tokens - few, dtype=dtype
    )
    return activations + least_bytes(weights, dtype, num_layers=spec.num_layers)


def plan_stream(
    spec: ModelSpec,
    tensors: Sequence[BoundTensor],
    devices: Sequence[str],
    *,
    compute: str,
    memory_bytes: int | None,
    context_tokens: int,
    chunk_tokens: int,
) -> tuple[int | None, StreamSettings]:
    """The longest span and the settings of the stream, with ``memory_bytes`` of each device.

    None: what is free. A span's activations get half of it at most: longer prompts are read in
    parts. Raises DoesNotFit.
    """
    if memory_bytes is None:
        memory_bytes = free_memory_bytes(devices)
    if memory_bytes is None:
        return None, StreamSettings()
    return share_memory(
        spec,
        StoredWeights.of(tensors),
        compute=compute,
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
    )


def share_memory(
    spec: ModelSpec,
    weights: StoredWeights,
    *,
    compute: str,
    memory_bytes: int,
    context_tokens: int,
    chunk_tokens: int,
) -> tuple[int, StreamSettings]:
    """As plan_stream; nothing is asked of the devices."""
    dtype = _DTYPES[compute]
    num_tokens = context_tokens
    while True:
        needed = activation_bytes(
            spec,
            num_tokens,
            chunk_tokens,
            prefix_tokens=context_tokens - num_tokens,  # of the last part of the longest prompt
            dtype=dtype,
        )
        few = num_tokens <= LEAST_TOKENS
        if few or needed <= memory_bytes // 2:
            try:
                settings = fit_settings(
                    weights,
                    dtype,
                    memory_bytes,
                    num_layers=spec.num_layers,
                    beside_bytes=needed,
                )
                return num_tokens, settings
            except DoesNotFit:
                if few:
                    raise
        num_tokens = max(min(LEAST_TOKENS, context_tokens), num_tokens // 2)
