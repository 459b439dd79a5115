"""The shapes and metadata of the two models that synthetic_gguf.py writes.

They are those of the models' own config.json and of how llama.cpp's converter names and stores
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

VOCABULARY = 32_768


@dataclass(frozen=True)
class Tensor:
    """``shape`` is GGUF's: the fastest dimension first. ``kind``: weight, norm, router or bias."""

    name: str
    shape: tuple[int, ...]
    kind: str = "weight"


@dataclass(frozen=True)
class Cut:
    """A model's shapes. ``control`` tokens: begin, end, padding, then those of its template."""

    architecture: str
    pre_tokenizer: str
    layers: int
    hidden: int
    metadata: dict[str, Any]
    layer_tensors: list[Tensor]
    control: tuple[str, ...]
    add_bos: bool
    template: str


def _experts(hidden: int, width: int, experts: int) -> list[Tensor]:
    return [
        Tensor("ffn_norm.weight", (hidden,), "norm"),
        Tensor("ffn_gate_inp.weight", (hidden, experts), "router"),
        Tensor("ffn_gate_exps.weight", (hidden, width, experts)),
        Tensor("ffn_up_exps.weight", (hidden, width, experts)),
        Tensor("ffn_down_exps.weight", (width, hidden, experts)),
    ]


def qwen_like(experts: int) -> Cut:
    """Cut a: grouped-query attention with normed heads, softmax routing, no shared expert."""
    hidden, heads, kv_heads, head_dim, width = 2048, 32, 4, 128, 768

    layer = [
        Tensor("attn_norm.weight", (hidden,), "norm"),
        Tensor("attn_q.weight", (hidden, heads * head_dim)),
        Tensor("attn_k.weight", (hidden, kv_heads * head_dim)),
        Tensor("attn_v.weight", (hidden, kv_heads * head_dim)),
        Tensor("attn_q_norm.weight", (head_dim,), "norm"),
        Tensor("attn_k_norm.weight", (head_dim,), "norm"),
        Tensor("attn_output.weight", (heads * head_dim, hidden)),
        *_experts(hidden, width, experts),
    ]
    return Cut(
        architecture="qwen3moe",
        pre_tokenizer="qwen2",
        layers=6,
        hidden=hidden,
        metadata={
            "context_length": 32_768,
            "feed_forward_length": 6144,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.freq_base": 1e6,
            "expert_count": experts,
            "expert_feed_forward_length": width,
        },
        layer_tensors=layer,
        control=("<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|im_start|>"),
        add_bos=False,
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


def deepseek_like(experts: int) -> Cut:
    """Cut b: latent attention, sigmoid routing in groups with a correction, one shared expert."""
    hidden, heads, q_rank, kv_rank, rope, nope, value, width = (
        7168,
        128,
        1536,
        512,
        64,
        128,
        128,
        2048,
    )

    layer = [
        Tensor("attn_norm.weight", (hidden,), "norm"),
        Tensor("attn_q_a_norm.weight", (q_rank,), "norm"),
        Tensor("attn_kv_a_norm.weight", (kv_rank,), "norm"),
        Tensor("attn_q_a.weight", (hidden, q_rank)),
        Tensor("attn_q_b.weight", (q_rank, heads * (nope + rope))),
        Tensor("attn_kv_a_mqa.weight", (hidden, kv_rank + rope)),
        Tensor("attn_k_b.weight", (nope, kv_rank, heads)),
        Tensor("attn_v_b.weight", (kv_rank, value, heads)),
        Tensor("attn_output.weight", (heads * value, hidden)),
        *_experts(hidden, width, experts),
        Tensor("exp_probs_b.bias", (experts,), "bias"),
        Tensor("ffn_gate_shexp.weight", (hidden, width)),
        Tensor("ffn_up_shexp.weight", (hidden, width)),
        Tensor("ffn_down_shexp.weight", (width, hidden)),
    ]
    return Cut(
        architecture="deepseek2",
        pre_tokenizer="deepseek-v3",
        layers=2,
        hidden=hidden,
        metadata={
            "context_length": 163_840,
            "feed_forward_length": 18_432,
            "attention.head_count": heads,
            "attention.head_count_kv": 1,
            "attention.key_length": kv_rank + rope,
            "attention.value_length": kv_rank,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": value,
            "attention.q_lora_rank": q_rank,
            "attention.kv_lora_rank": kv_rank,
            "rope.dimension_count": rope,
            "rope.freq_base": 1e4,
            "leading_dense_block_count": 0,
            "vocab_size": VOCABULARY,
            "expert_count": experts,
            "expert_shared_count": 1,
            "expert_feed_forward_length": width,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,  # sigmoid
            "expert_group_count": 8,
            "expert_group_used_count": 4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
        layer_tensors=layer,
        control=(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜▁pad▁｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
        ),
        add_bos=True,
        template=(
            "{{ bos_token }}{% for m in messages %}"
            "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
            "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
        ),
    )


CUTS: dict[str, tuple[Callable[[int], Cut], int]] = {
    "a": (qwen_like, 128),
    "b": (deepseek_like, 64),
}


def tensors_of(cut: Cut) -> Iterator[Tensor]:
    """All tensors, in the file's order."""
    yield Tensor("token_embd.weight", (cut.hidden, VOCABULARY))
    yield Tensor("output_norm.weight", (cut.hidden,), "norm")
    yield Tensor("output.weight", (cut.hidden, VOCABULARY))
    for layer in range(cut.layers):
        for tensor in cut.layer_tensors:
            yield Tensor(f"blk.{layer}.{tensor.name}", tensor.shape, tensor.kind)
