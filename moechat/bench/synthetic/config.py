"""A config.json of a registry entry's real shapes, of any number of layers and experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moechat.errors import Usage

# What a config.json calls the dimensions, by architecture; models.toml's names otherwise.
_LATENT = {
    "num_experts": "n_routed_experts",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_groups": "n_group",
    "num_groups_kept": "topk_group",
    "moe_intermediate_size": "moe_intermediate_size",
}
_GROUPED = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_LOCAL = _GROUPED | {"num_experts": "num_local_experts"}  # experts are of intermediate_size
_NAMES: dict[str, dict[str, str]] = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeForCausalLM": _GROUPED
    | {
        "num_experts": "n_routed_experts",
        "num_groups": "n_group",
        "num_groups_kept": "topk_group",
        "moe_intermediate_size": "moe_intermediate_size",
    },
    "GptOssForCausalLM": _LOCAL | {"sliding_window": "sliding_window"},
    "MixtralForCausalLM": _LOCAL,
    "OlmoeForCausalLM": _GROUPED | {"num_experts": "num_experts"},
    "Qwen3MoeForCausalLM": _GROUPED
    | {"num_experts": "num_experts", "moe_intermediate_size": "moe_intermediate_size"},
}
_COMMON = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_experts_per_token": "num_experts_per_tok",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of a registry entry's dimensions: its counts, and the entry for the rest.

    ``dense_layers`` lead, ``moe_layers`` follow. ``name`` is the registry's.
    """

    name: str
    entry: dict[str, Any]
    dense_layers: int
    moe_layers: int
    experts: int
    vocab: int

    @classmethod
    def of_entry(cls, name: str, entry: dict[str, Any]) -> Shape:
        """The whole model. Raises Usage when the entry says too little."""
        geometry = entry.get("geometry")
        architecture = entry.get("architecture")
        if not isinstance(geometry, dict) or architecture not in _NAMES or "config" not in entry:
            raise Usage(
                f"there are no shapes of {name[:60]!a} to build a synthetic model of",
                "that takes an entry in models.toml with geometry and config, of one of the "
                f"architectures {', '.join(_NAMES)}",
                f"Its own files are measured by `moechat bench model {name[:60]}`",
            )
        try:
            layers, dense = geometry["num_layers"], geometry["num_dense_layers"]
            counts = {"experts": geometry["num_experts"], "vocab": geometry["vocab_size"]}
            return cls(
                name=name,
                entry=entry,
                dense_layers=int(dense),
                moe_layers=int(layers) - int(dense),
                **counts,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Usage(
                f"the geometry of {name} in models.toml is incomplete", str(error)
            ) from None

    def cut(self, **counts: int) -> Shape:
        """The same dimensions with other counts: ``moe_layers=1``, ``vocab=64`` and so on."""
        return replace(self, **counts)  # type: ignore[arg-type]

    @property
    def geometry(self) -> dict[str, Any]:
        """The entry's, uncut."""
        table: dict[str, Any] = self.entry["geometry"]
        return table

    @property
    def groups(self) -> int:
        """Into which the experts of a layer are divided; 1 where routing knows none."""
        return int(max(self.geometry.get("num_groups", 1), 1))

    @property
    def period(self) -> int:
        """Layers after which the kinds of attention repeat: 2 where every other one slides."""
        return 2 if self.geometry.get("num_sliding_layers", 0) else 1

    @property
    def stacks_experts(self) -> bool:
        """Whether the experts of a layer are one tensor."""
        return bool(self.entry["architecture"] == "GptOssForCausalLM")


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json, without quantization_config: whatever is stored is said by synthetic_tensors."""
    geometry, architecture = shape.geometry, shape.entry["architecture"]
    names = _COMMON | _NAMES[architecture]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "num_hidden_layers": shape.dense_layers + shape.moe_layers,
        "max_position_embeddings": shape.entry.get("limits", {}).get("context_tokens", 4096),
        "hidden_act": "silu",
    }
    config |= {names[key]: value for key, value in geometry.items() if key in names}
    config |= {names["num_experts"]: shape.experts, "vocab_size": shape.vocab}
    if architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"):
        shared, size = geometry["shared_intermediate_size"], geometry["moe_intermediate_size"]
        config |= {"n_shared_experts": shared // size, "first_k_dense_replace": shape.dense_layers}
    if "q_lora_rank" in config and not config["q_lora_rank"]:
        config["q_lora_rank"] = None
    stated: dict[str, Any] = shape.entry["config"]
    return config | stated
