"""From a checkpoint folder to a model: which architecture, its dimensions, its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged, ModelNotFound
from moechat.json_file import read_json_object
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import HARMLESS
from moechat.models.draft_tensors import stored_draft_table
from moechat.models.name_listing import name_listing
from moechat.models.quantization import Quantization, read_quantization
from moechat.models.spec import BoundTensor, ModelSpec, TensorSource, TensorSpec, TensorView

# config.json's architecture string: the folder of this package that implements it
_FOLDERS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextForCausalLM": "gemma3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_CONFIG_LIMIT_BYTES = 16_000_000

# Tensors that are of no use here: rotary frequencies that old tools stored although config.json
# determines them; the shape of packed weights, which config.json determines too; how activations
# and the KV cache were quantised in calibration, which moechat does not imitate.
_SKIPPED = (
    ".rotary_emb.inv_freq",
    ".weight_shape",
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


def load_spec(folder: Path) -> ModelSpec:
    """The dimensions of the model in a folder of Hugging Face layout.

    Raises ModelNotFound without config.json, CheckpointDamaged when it cannot be read,
    ArchitectureUnsupported when moechat cannot compute what it asks for.
    """
    path = folder / "generation_config.json"
    generation = read_json_object(path, _CONFIG_LIMIT_BYTES) if os.path.lexists(path) else {}
    return read_spec(load_config(folder), generation, str(folder / "config.json"))


def load_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelNotFound without it, CheckpointDamaged."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        why = (
            "it has no config.json, and no .gguf file"
            if os.path.isdir(folder)
            else "there is no such folder"
        )
        raise ModelNotFound(f"{folder} is not a model folder", why)
    return read_json_object(path, _CONFIG_LIMIT_BYTES)


def read_spec(
    config: dict[str, Any], generation: dict[str, Any], where: str = "config.json"
) -> ModelSpec:
    """The dimensions that a config.json and a generation_config.json describe.

    ``where`` names the former in messages. Raises ArchitectureUnsupported, naming the key.
    """
    read = ConfigReader(config, where)
    module = _module(_FOLDERS[architecture_of(config, where)], "spec")
    spec: ModelSpec = module.read_spec(read, ConfigReader(generation, "generation_config.json"))
    read_quantization(read)
    read.finish(HARMLESS)
    return spec


def architecture_of(config: dict[str, Any], where: str = "config.json") -> str:
    """The first architecture of a config.json that moechat implements, as it is called there.

    ``where`` names the file in messages. Raises ArchitectureUnsupported.
    """
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in _FOLDERS:
            return name
    raise ArchitectureUnsupported(
        f"{where} asks for the architecture {ascii(architectures)[:120]}",
        f"moechat implements {', '.join(sorted(_FOLDERS))}",
    )


def tensor_table(spec: ModelSpec, config: dict[str, Any]) -> list[TensorSpec]:
    """Every tensor of the model as an unquantised checkpoint stores it, in order of layers.

    ``config`` is the one that ``spec`` was read from.
    """
    module = _module(spec.architecture, "tensors")
    table: list[TensorSpec] = module.tensor_table(spec, ConfigReader(config))
    return table


def draft_tensor_table(spec: ModelSpec, config: dict[str, Any]) -> list[TensorSpec] | None:
    """Every tensor of the first multi-token-prediction layer.

    None: the architecture's folder has no such table, and stored_draft_table refuses speculation
    with a message that names the architecture.
    """
    module = _module(spec.architecture, "tensors")
    if not hasattr(module, "draft_tensor_table"):
        return None
    table: list[TensorSpec] = module.draft_tensor_table(spec, ConfigReader(config))
    return table


def bind_tensors(
    spec: ModelSpec, checkpoint: TensorSource, config: dict[str, Any], *, draft: bool = False
) -> list[BoundTensor]:
    """Every tensor of the model with its stored parts, in order of layers.

    ``draft``: the multi-token-prediction layer, too. Raises CheckpointDamaged for missing,
    left-over or misshapen tensors, ArchitectureUnsupported for element types that have no kernel,
    BadParameter when there is no layer to draft with.
    """
    # Imported here, with numpy: whoever only counts tensors needs neither.
    from moechat.models.quantized_parts import StoredParts, bind_tensor
    from moechat.models.tied_head import take_stored_head

    stored = checkpoint.tensors
    quantization = read_quantization(ConfigReader(config))
    parts = StoredParts(stored)
    table = tensor_table(spec, config)
    if draft:
        table += stored_draft_table(spec, draft_tensor_table(spec, config), stored)
    found = [bind_tensor(entry, parts, quantization) for entry in table]
    if spec.tied_embeddings:
        take_stored_head(parts)
    left_over = [
        name
        for name, tensor in stored.items()
        if name not in parts.taken and not _is_skipped(spec, tensor, stored, quantization)
    ]
    if parts.missing or left_over:
        listings = [name_listing("missing", parts.missing), name_listing("not expected", left_over)]
        raise CheckpointDamaged(
            f"the weights are not those that config.json describes ({spec.architecture})",
            "; ".join(listing for listing in listings if listing),
        )
    return [bound for bound in found if bound is not None]


def _module(folder: str, name: str) -> Any:
    return import_module(f"moechat.models.{folder}.{name}")


def _is_skipped(
    spec: ModelSpec,
    tensor: TensorView,
    stored: Mapping[str, TensorView],
    quantization: Quantization,
) -> bool:
    """Whether a tensor that the model does not use is known not to matter."""
    name = tensor.name
    if name.endswith(_SKIPPED):
        return True
    if quantization.method == "gptq" and name.endswith(".bias"):
        # Early tools gave every quantised layer a bias, of zeros where the model has none.
        return name.removesuffix("bias") + "qweight" in stored and not tensor.array.any()
    match = re.match(r"model\.layers\.(\d{1,6})\.", name)  # multi-token prediction
    return match is not None and 0 <= int(match[1]) - spec.num_layers < spec.num_mtp_layers
