"""What config.json says of quantised weights: the parameters that the stored parts need.

Which tensors are quantised is not taken from here but from what is stored (quantized_parts.py).
How activations were quantised does not matter: moechat never quantises activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from moechat.models.config_reader import ConfigReader

_WHOLE = -1  # AWQ's and GPTQ's group size for one group a column
_MAX_GROUP = 1 << 16
_PACKED, _FLOAT = "pack-quantized", "float-quantized"

# Lists of modules that were left alone, what activations and the KV cache were made, and how the
# quantising tool went about it.
_HARMLESS = {
    "fp8": (
        "activation_scheme",
        "ignore",
        "ignored_layers",
        "kv_cache_scheme",
        "modules_to_not_convert",
        "scale_fmt",
    ),
    "mxfp4": ("modules_to_not_convert",),
    "compressed-tensors": (
        "global_compression_ratio",
        "ignore",
        "kv_cache_scheme",
        "quantization_status",
        "version",
    ),
    "awq": (
        "backend",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "ignore",
        "lm_head",
        "modules_to_fuse",
        "modules_to_not_convert",
    ),
    "gptq": (
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "exllama_config",
        "lm_head",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "pack_dtype",
        "pad_token_id",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    ),
}
_HARMLESS_WEIGHTS = ("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype")
_HARMLESS_GROUP = ("input_activations", "output_activations", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """``method`` "" is an unquantised model.

    ``fp8_block``: rows and columns that share a scale in block FP8. ``group_sizes``: inputs that
    share a scale, as 4-bit formats declare them; 0 is all inputs. ``act_order``: GPTQ inputs are
    assigned to groups by an index that must be stored.
    """

    method: str = ""
    fp8_block: tuple[int, int] | None = None
    group_sizes: tuple[int, ...] = ()
    act_order: bool = False


def read_quantization(read: ConfigReader) -> Quantization:
    """From quantization_config, or compression_config as compressed-tensors once called it.

    Raises ArchitectureUnsupported, naming the key.
    """
    section, old = read.section("quantization_config"), read.section("compression_config")
    if section is not None and old is not None:
        raise read.unsupported("compression_config", "quantization_config says it a second time")
    if section is not None:
        section.only("quant_method", *_READERS, required=True)
        method = section.text("quant_method") or ""
    elif old is not None:
        section, method = old, "compressed-tensors"
        section.only("quant_method", method)
    else:
        return Quantization()
    quantization = _READERS[method](section)
    section.finish(_HARMLESS[method])
    return quantization


def _fp8(section: ConfigReader) -> Quantization:
    section.only("fmt", "e4m3")
    section.only("dequantize", False)
    return Quantization(method="fp8", fp8_block=_block(section, "weight_block_size"))


def _mxfp4(section: ConfigReader) -> Quantization:
    section.only("dequantize", False)
    return Quantization(method="mxfp4")


def _awq(section: ConfigReader) -> Quantization:
    section.only("bits", 4, required=True)
    for key in ("version", "format", "checkpoint_format"):  # one after another of the tools' names
        section.only(key, "gemm", "GEMM")
    section.only("method", "awq")
    section.only("zero_point", True)
    return Quantization(method="awq", group_sizes=(_group_size(section),))


def _gptq(section: ConfigReader) -> Quantization:
    section.only("bits", 4, required=True)
    # The later layout stores zero points as they are, the usual one less one.
    for key in ("checkpoint_format", "format", "method"):
        section.only(key, "gptq")
    section.only("is_marlin_format", False)  # words permuted for one GPU kernel
    section.only("pack_dtype", "int32")
    section.only("dynamic", {})
    section.boolean("sym", default=True)  # asymmetric or not: the zero points are stored
    return Quantization(
        method="gptq",
        group_sizes=(_group_size(section),),
        act_order=section.boolean("desc_act", default=False),
    )


def _compressed_tensors(section: ConfigReader) -> Quantization:
    section.only("transform_config", {})
    sparsity = section.section("sparsity_config")
    if sparsity is not None:
        sparsity.only("format", "dense")
        sparsity.finish(("global_sparsity", "ignore", "registry_requires_subclass",
                         "sparsity_structure", "targets"))  # fmt: skip
    section.only("format", _PACKED, _FLOAT, "mixed-precision", required=True)
    group_sizes: list[int] = []
    blocks: set[tuple[int, int]] = set()
    for group in section.sections("config_groups"):
        group.only("format", _PACKED, _FLOAT)
        weights = group.section("weights")
        if weights is not None:
            weights.only("type", "int", "float", required=True)
            if weights.text("type") == "int":
                group_sizes.append(_int4_group(weights))
            else:
                blocks |= _fp8_blocks(weights)
            weights.only("symmetric", True, required=True)
            weights.finish(_HARMLESS_WEIGHTS)
        group.finish(_HARMLESS_GROUP)
    if len(blocks) > 1:
        raise section.unsupported("config_groups", "one block size for all is implemented")
    return Quantization(
        method="compressed-tensors",
        fp8_block=blocks.pop() if blocks else None,
        group_sizes=tuple(dict.fromkeys(group_sizes)),
    )


def _int4_group(weights: ConfigReader) -> int:
    weights.only("num_bits", 4, required=True)
    weights.only("strategy", "group", required=True)
    # Orders that leave no trace in the stored weights; "group" would need an index.
    weights.only("actorder", "weight", "static", False)
    weights.only("block_structure")
    weights.only("group_size", 32, 64, 128, required=True)
    return weights.integer("group_size", 32, 128)


def _fp8_blocks(weights: ConfigReader) -> set[tuple[int, int]]:
    weights.only("num_bits", 8, required=True)
    weights.only("strategy", "channel", "tensor", "block", required=True)
    weights.only("actorder", False)
    weights.only("group_size")
    block = _block(weights, "block_structure")
    if (weights.text("strategy") == "block") != (block is not None):
        raise weights.unsupported("block_structure", "it goes with the strategy 'block'")
    return {block} if block else set()


def _block(section: ConfigReader, key: str) -> tuple[int, int] | None:
    sizes = section.integers(key, 1, _MAX_GROUP)
    if not sizes:
        return None
    if len(sizes) != 2:
        raise section.unsupported(key, "rows and columns are needed")
    return sizes[0], sizes[1]


def _group_size(section: ConfigReader) -> int:
    section.only("group_size", _WHOLE, 16, 32, 64, 128, 256, 512, 1024, required=True)
    return max(section.integer("group_size", _WHOLE, 1024), 0)


_READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
