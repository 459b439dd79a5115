"""Turns a model in Hugging Face layout into a GGUF file as the public converter does, for tests.

What it does to tensors: reorders rows of llama's q and k, adds 1 to Gemma's norms, splits
DeepSeek's kv_b, stacks experts, splits and repacks gpt-oss' experts.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf_writer as w
import numpy as np

from moechat.weights.mapped import Checkpoint

Tensors = dict[str, np.ndarray]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
}
# What a layer's tensor is called, and GGUF's name for it.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.shared_expert{plural}.{part}_proj": f"ffn_{part}_shexp"
        for plural in ("", "s")
        for part in ("gate", "up", "down")
    },
}
_SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NORM_BEFORE_FFN_IS_POST_ATTENTION = ("glm4_moe", "gpt_oss")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+?)(?:_proj)?\.weight")
_MIXTRAL_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def convert_folder(folder: Path, dtype: str = "F32", extra: dict[str, Any] | None = None) -> bytes:
    """The GGUF file of a folder with BF16, F32 or MXFP4 weights; ``extra``: more metadata.

    Matrices are stored as ``dtype`` ("F32", "BF16"), others as F32.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = Checkpoint.open(folder).tensors
    tensors = {name: _float32(tensor.array, tensor.dtype) for name, tensor in stored.items()}
    return convert(config, tensors, dtype, extra)


def convert(
    config: dict[str, Any],
    tensors: Tensors,
    dtype: str = "F32",
    extra: dict[str, Any] | None = None,
) -> bytes:
    """The GGUF file of config.json and float32 tensors (MXFP4 parts: uint8)."""
    names = {"llama": _llama, "gemma2": _gemma, "gemma3": _gemma, "deepseek2": _deepseek}
    architecture = ARCHITECTURES[config["model_type"]]
    metadata = {**convert_config(config), **(extra or {})}
    converted = _renamed(config, tensors)
    if architecture in names:
        converted = names[architecture](config, converted)
    return w.gguf_bytes(metadata, {name: _stored(t, dtype) for name, t in converted.items()})


def _float32(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    assert dtype in ("F32", "U8"), dtype
    return array


def _stored(tensor: np.ndarray | w.Blocks, dtype: str) -> np.ndarray | w.Blocks:
    if isinstance(tensor, w.Blocks) or dtype == "F32" or tensor.ndim < 2:
        return tensor
    return w.bf16(tensor)


def convert_config(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata by GGUF's keys; float32 where the format has it."""
    c, name = config, ARCHITECTURES[config["model_type"]]
    rope = c.get("rope_parameters") or {}
    scaling = {**(c.get("rope_scaling") or {}), **rope}
    head_dim = c.get("head_dim")
    values: dict[str, Any] = {
        "block_count": c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0),
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta") or c["rope_theta"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "expert_count": c.get("num_local_experts")
        or c.get("num_experts")
        or c.get("n_routed_experts"),
        "expert_used_count": c.get("num_experts_per_tok"),
        "expert_group_count": c.get("n_group"),
        "expert_group_used_count": c.get("topk_group"),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}.get(c.get("scoring_func", "")),
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
        "expert_shared_count": c.get("n_shared_experts"),
        "leading_dense_block_count": c.get("first_k_dense_replace"),
        "nextn_predict_layers": c.get("num_nextn_predict_layers") or None,
        "attn_logit_softcapping": c.get("attn_logit_softcapping"),
        "final_logit_softcapping": c.get("final_logit_softcapping"),
    }
    values |= _SPECIAL.get(name, lambda config: {})(c)
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("linear", "yarn"):
        values["rope.scaling.type"] = kind
        values["rope.scaling.factor"] = float(scaling["factor"])
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        values["rope.scaling.yarn_beta_fast"] = float(scaling["beta_fast"])
        values["rope.scaling.yarn_beta_slow"] = float(scaling["beta_slow"])
        if "mscale_all_dim" in scaling:
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    metadata = {f"{name}.{key}": item for key, item in values.items() if item is not None}
    return {"general.architecture": name, **metadata, **_token_ids(c)}


def _token_ids(config: dict[str, Any]) -> dict[str, int]:
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ids = {"bos": config.get("bos_token_id"), "eos": ends[0], "eot": (ends[1:] or [None])[0]}
    return {f"tokenizer.ggml.{key}_token_id": id_ for key, id_ in ids.items() if id_ is not None}


def _llama_special(c: dict[str, Any]) -> dict[str, Any]:
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    # The public converter drops Mistral's window; files that state it are the same otherwise.
    return {
        "rope.dimension_count": head_dim,
        "vocab_size": c["vocab_size"],
        "attention.sliding_window": c.get("sliding_window"),
    }


def _gemma_special(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": c.get("sliding_window_pattern"),
        # Real models have the architecture's own scale; this key says another one.
        "attention.scale": c["query_pre_attn_scalar"] ** -0.5,
    }


def _glm_special(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.dimension_count": int(c["head_dim"] * c["partial_rotary_factor"]),
        "expert_gating_func": 2,
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
    }


def _deepseek_special(c: dict[str, Any]) -> dict[str, Any]:
    latent, rope_dim = c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope_dim,
        "attention.value_length": latent,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": rope_dim,
        "vocab_size": c["vocab_size"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"] or None,
        "block_count": c["num_hidden_layers"],  # its converter drops these layers
        "nextn_predict_layers": None,
    }


def _gpt_oss_special(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": c["sliding_window"],
        "expert_feed_forward_length": c["intermediate_size"],
    }


_SPECIAL = {
    "llama": _llama_special,
    "gemma2": _gemma_special,
    "gemma3": _gemma_special,
    "glm4moe": _glm_special,
    "deepseek2": _deepseek_special,
    "gpt-oss": _gpt_oss_special,
}


def _renamed(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Tensors by GGUF's names; experts stacked; layers beyond the model's dropped."""
    kind, names = config["model_type"], dict(_LAYER_NAMES)
    if kind.startswith("gemma"):
        names |= _SANDWICH_NAMES
    if kind in _NORM_BEFORE_FFN_IS_POST_ATTENTION:
        names["post_attention_layernorm"] = "post_attention_norm"
    result: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match is None:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            result[f"{top.get(name.removesuffix('.weight'), 'output')}.weight"] = tensor
            continue
        if int(match[1]) >= config["num_hidden_layers"]:
            continue
        block, inner = f"blk.{match[1]}.", match[2]
        expert = _EXPERT.fullmatch(inner)
        if expert is not None:
            part = _MIXTRAL_PARTS.get(expert[2], expert[2])
            experts.setdefault(f"{block}ffn_{part}_exps.weight", {})[int(expert[1])] = tensor
        elif inner.startswith("mlp.experts."):
            result |= _gpt_oss_experts(block, inner.removeprefix("mlp.experts."), tensor, tensors)
        elif inner == "self_attn.sinks":
            result[f"{block}attn_sinks.weight"] = tensor
        elif inner == "mlp.gate.e_score_correction_bias":
            result[f"{block}exp_probs_b.bias"] = tensor
        else:
            stem, _, suffix = inner.rpartition(".")
            tensor = tensor[0] if stem == "mlp.shared_expert_gate" else tensor
            result[f"{block}{names[stem]}.{suffix}"] = tensor
    for name, by_number in experts.items():
        result[name] = np.stack([by_number[number] for number in range(len(by_number))])
    return result


def _gpt_oss_experts(block: str, name: str, tensor: np.ndarray, all_tensors: Tensors) -> Any:
    """gate_up has gate and up in alternating outputs; matrices are [experts, inputs, outputs]."""
    if name.endswith("_scales"):
        return {}  # goes with the blocks
    part, kind = re.fullmatch(r"(gate_up|down)_proj(_bias|_blocks|)", name).groups()
    suffix = ".bias" if kind == "_bias" else ".weight"
    if kind == "_blocks":
        layer = block.split(".")[1]
        scales = all_tensors[f"model.layers.{layer}.mlp.experts.{part}_proj_scales"]
        tensor = np.concatenate([scales[..., None], _low_nibbles_first(tensor)], axis=-1)
    elif not kind:
        tensor = tensor.swapaxes(1, 2)
    parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if part == "gate_up" else {part: tensor}
    if kind == "_blocks":
        parts = {key: _mxfp4(blocks) for key, blocks in parts.items()}
    return {f"{block}ffn_{key}_exps{suffix}": item for key, item in parts.items()}


def _low_nibbles_first(blocks: np.ndarray) -> np.ndarray:
    """[..., 16] bytes with values 2 i, 2 i + 1 become bytes with values i, i + 16."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    return values[..., :16] | values[..., 16:] << 4


def _mxfp4(blocks: np.ndarray) -> w.Blocks:
    """[experts, rows, blocks, 17] bytes: a scale, then codes."""
    experts, rows, count, _ = blocks.shape
    data = np.ascontiguousarray(blocks).reshape(experts, rows, count * 17)
    return w.Blocks("MXFP4", (experts, rows, count * 32), data)


def _llama(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Rows of each head of q and k from two halves to pairs; the factors of llama3's scaling."""
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in list(tensors):
        heads = heads_of.get(name.split(".")[-2])
        if heads:
            tensor = tensors[name]
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensors[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(config, scaling)
    return tensors


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = scaling.get("rope_theta") or config["rope_theta"]
    factor, low, high = (scaling[f"{key}factor"] for key in ("", "low_freq_", "high_freq_"))
    factors = []
    for pair in range(head_dim // 2):
        turns = scaling["original_max_position_embeddings"] * theta ** (-2 * pair / head_dim)
        turns /= 2 * math.pi
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (kept + (1 - kept) / factor))
    return np.array(factors, np.float32)


def _gemma(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor + np.float32(1) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def _deepseek(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """kv_b by head: keys as [latent, nope], values as [v, latent]."""
    heads, nope_dim = config["num_attention_heads"], config["qk_nope_head_dim"]
    result = {}
    for name, tensor in tensors.items():
        if not name.endswith("attn_kv_b.weight"):
            result[name] = tensor
            continue
        block = name.removesuffix("attn_kv_b.weight")
        by_head = tensor.reshape(heads, -1, tensor.shape[1])
        result[f"{block}attn_k_b.weight"] = by_head[:, :nope_dim].swapaxes(1, 2)
        result[f"{block}attn_v_b.weight"] = by_head[:, nope_dim:]
    return result
