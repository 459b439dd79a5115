"""Device memory that a streamed forward pass needs beside the weights, by its phases.

Shapes: T new tokens, n keys, D hidden, W elements of a slot, H heads, d and v their widths, E
experts, K a token's, I an MLP's width; e bytes of a matrix input (2, exact mode 4).
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec
from moechat.prefill.gpu import layer_attention
from moechat.prefill.gpu.attention import SCORE_BYTES

WORK_BYTES = 1 << 30  # of the pairs (token, expert) that are computed at a time
_ROUTING_BYTES = 40  # a token and expert: logits, scores, sorting
_PAIR_BYTES = 40  # a token and chosen expert: ids, weights, places
_LOGIT_ROWS = 1024
# What the allocator's pieces leave unused between tensors of other sizes.
_UNUSED = 1 / 12


def activation_bytes(
    spec: ModelSpec,
    num_tokens: int,
    chunk_tokens: int,
    *,
    prefix_tokens: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """The most that is held at once for ``num_tokens`` after ``prefix_tokens`` in the cache.

    Always the residual stream (4 D T) and angles; then the largest of
    attention: normed inputs (e D T), slots ((e + 4) W T + 8 W n), values of all heads (e H v T),
    those of the heads at a time; after it the values and a chunk's output (8 D);
    experts: inputs and sums ((e + 4) D T) beside the routing of all tokens, the work of the pairs
    at a time and inputs as float16 (2 D T), or a chunk of the shared or dense MLP (4 D, 4 I twice);
    logits: a tile's.
    """
    chunk = min(num_tokens, chunk_tokens)
    hidden, e = spec.hidden_size, dtype.itemsize
    always = 4 * hidden * num_tokens
    always += sum(8 * len(rope.inverse_frequencies) for rope in spec.ropes) * num_tokens
    widths = [spec.intermediate_size] if not all(layer.moe for layer in spec.layers) else [0]
    experts = 0
    if spec.moe is not None:
        moe = spec.moe
        widths.append(moe.shared_intermediate_size)
        pairs = num_tokens * moe.num_experts_per_token
        work = pairs * pair_bytes(hidden, moe.intermediate_size)
        routing = _ROUTING_BYTES * moe.num_experts * num_tokens + 8 * hidden * chunk
        computing = min(WORK_BYTES, work) + _PAIR_BYTES * pairs + 2 * hidden * num_tokens
        experts = max(computing, routing)
    mlp = chunk * (10 * hidden + (4 * 3 + 2) * max(widths))
    feed_forward = (e + 4) * hidden * num_tokens + max(experts, mlp)
    attention = _attention_bytes(spec, num_tokens, num_tokens + prefix_tokens, e)
    logits = 8 * spec.vocab_size * min(num_tokens, _LOGIT_ROWS)
    values = e * _value_width(spec) * num_tokens
    output = values + (8 * hidden + 2 * _value_width(spec)) * chunk
    phases = (attention, output, feed_forward, logits)
    return int((always + max(phases)) * (1 + _UNUSED))


def pair_bytes(hidden: int, width: int) -> int:
    """Of a pair (token, expert): gate and branch in float32, the hidden state, also as float16."""
    return 4 * width + 4 * width + 4 * hidden


def _value_width(spec: ModelSpec) -> int:
    sizes = spec.attention
    each = sizes.v_dim if isinstance(sizes, LatentAttention) else sizes.head_dim
    return spec.num_heads * each


def _attention_bytes(spec: ModelSpec, num_tokens: int, num_keys: int, e: int) -> int:
    sizes = spec.attention
    common = (e * (spec.hidden_size + _value_width(spec)) + (e + 4) * spec.kv_width) * num_tokens
    common += 8 * spec.kv_width * num_keys
    if isinstance(sizes, GroupedAttention):
        queries, keys = _value_width(spec), spec.kv_width
        # float32, and in BF16 with the keys and values of each group for all its heads
        common += num_tokens * (4 * queries + 8 * keys)
        fused = e * queries * (2 * num_tokens + 2 * num_keys)
        plain = 4 * keys * num_keys + 3 * SCORE_BYTES + 4 * queries * num_tokens
        return common + max(fused, plain)
    width = sizes.nope_dim + sizes.rope_dim
    common += (4 + e) * sizes.q_lora_rank * num_tokens
    head = e * (width + sizes.v_dim) * (num_tokens + num_keys)
    heads = min(spec.num_heads, max(1, layer_attention.GROUP_BYTES // head))
    rows = min(max(num_tokens, num_keys), layer_attention.WIDE_ROWS)
    wide = 4 * rows * (max(width, sizes.nope_dim + sizes.v_dim)) * heads
    joined = 12 * heads * sizes.v_dim * num_tokens if num_keys > num_tokens else 0
    return common + heads * head + max(wide, joined)
