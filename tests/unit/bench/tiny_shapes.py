"""Registry entries whose shapes are small, one for each family: real ones scaled down."""

from __future__ import annotations

import copy

from moechat.bench.synthetic.config import Shape
from moechat.registry import load_registry

LATENT = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 512,
}
GROUPED = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
SAME_SIZE = GROUPED | {"intermediate_size": 64}  # experts are of intermediate_size
CHANGES = {
    "deepseek-v3": LATENT
    | {
        "q_lora_rank": 96,
        "shared_intermediate_size": 64,
        "num_experts": 32,
        "num_groups": 4,
        "num_groups_kept": 2,
        "num_experts_per_token": 4,
        "num_layers": 6,
    },
    "deepseek-v2-lite": LATENT | {"shared_intermediate_size": 128, "num_experts": 16},
    "moonlight": LATENT | {"shared_intermediate_size": 128, "num_experts": 16},
    "kimi-k2-thinking": LATENT
    | {"q_lora_rank": 96, "shared_intermediate_size": 64, "num_experts": 24},
    "qwen3-30b-a3b": GROUPED | {"num_experts": 16},
    "glm-4.5-air": GROUPED | {"num_experts": 16, "shared_intermediate_size": 64},
    "glm-4.6": GROUPED | {"num_experts": 16, "shared_intermediate_size": 64},
    "gpt-oss-20b": SAME_SIZE | {"num_experts": 8, "sliding_window": 16},
    "olmoe-1b-7b": SAME_SIZE | {"num_experts": 16},
    "mixtral-8x7b": SAME_SIZE,
}


def tiny_entry(name: str) -> dict:
    entry = copy.deepcopy(load_registry().entries[name])
    entry["geometry"] |= CHANGES[name]
    return entry


def tiny(name: str) -> Shape:
    return Shape.of_entry(name, tiny_entry(name))


def real(name: str) -> Shape:
    return Shape.of_entry(name, load_registry().entries[name])
