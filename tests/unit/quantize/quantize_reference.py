"""Checkpoints to convert, and what their weights are by the formats' definitions, in float64.

Written without the product's code: the safetensors library reads, tables decode.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
Tensors = dict[str, tuple[str, np.ndarray]]


def _fp8_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


FP8_VALUES = np.array([_fp8_value(code) for code in range(256)])
FP8_VALUES[[0x7F, 0xFF]] = np.nan
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bits of finite values, to the nearest BF16, ties to even."""
    low = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    down, rest = low >> 16, low & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (down & 1 == 1))
    return (down + up).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaN payloads
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def write_checkpoint(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, files: int = 1
) -> Path:
    """A model folder with the tensors dealt out to ``files`` files, in their order."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    size = -(-len(names) // files)
    owners = {}
    for number in range(files):
        file_name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        file_name = "model.safetensors" if files == 1 else file_name
        header, data = {}, b""
        for name in names[number * size : (number + 1) * size]:
            dtype, array = tensors[name]
            assert array.dtype == DTYPES[dtype]
            content = np.ascontiguousarray(array).tobytes()
            span = [len(data), len(data) + len(content)]
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
            data += content
            owners[name] = file_name
        text = json.dumps(header).encode()
        (folder / file_name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    if files > 1:
        index = {"metadata": {}, "weight_map": owners}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["Any"]}))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """All tensors as the files have them: type, shape, bytes; the index is checked on the way."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = (entry["dtype"], entry["shape"], content[begin:end])
        with safe_open(file, "np") as library:  # the library's own checks of the file
            assert set(library.keys()) == set(header)
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        assert set(json.loads(index_path.read_text())["weight_map"]) == set(tensors)
    return tensors


def decode(folder: Path) -> dict[str, np.ndarray]:
    """The float64 values of all weights, by the names they have when they are not quantised."""
    arrays = {
        name: (dtype, np.frombuffer(content, DTYPES[dtype]).reshape(shape))
        for name, (dtype, shape, content) in stored(folder).items()
    }
    values = {}
    for name, (dtype, array) in arrays.items():
        if dtype == "F8_E4M3":
            scale_name = name + "_scale_inv"
            scale_name = scale_name if scale_name in arrays else name + "_scale"
            values[name] = FP8_VALUES[array] * _spread(arrays[scale_name], array.shape)
        elif name.endswith("_packed"):
            base = name.removesuffix("_packed")
            shape = tuple(int(size) for size in arrays[base + "_shape"][1])
            codes = [(array.view(np.uint32) >> (4 * nibble)) & 15 for nibble in range(8)]
            whole = np.stack(codes, axis=-1).reshape(shape).astype(np.float64) - 8
            values[base] = whole * _spread(arrays[base + "_scale"], shape)
        elif name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            nibbles = np.stack([array & 15, array >> 4], axis=-1)  # [experts, out, groups, 16, 2]
            powers = 2.0 ** (arrays[base + "_scales"][1].astype(np.float64) - 127)
            whole = FP4_VALUES[nibbles] * powers[..., None, None]
            values[base] = whole.reshape(*array.shape[:2], -1).transpose(0, 2, 1)
        elif not name.endswith(("_scale", "_scale_inv", "_scales", "_shape")):
            values[name] = _plain(dtype, array)
    return values


def _plain(dtype: str, array: np.ndarray) -> np.ndarray:
    return bf16_values(array) if dtype == "BF16" else array.astype(np.float64)


def _spread(scale: tuple[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A scale for every element of ``shape``: from a row, a 128x128 grid, or groups of a row."""
    values = _plain(*scale)
    rows, cols = shape
    if values.ndim == 1:
        values = values[:, None]
    row_block = 128 if values.shape[0] == -(-rows // 128) and values.shape[0] != rows else 1
    col_block = 128 if row_block == 128 else -(-cols // values.shape[1])
    return values.repeat(row_block, 0)[:rows].repeat(col_block, 1)[:, :cols]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plain(values: np.ndarray, dtype: str = "BF16") -> tuple[str, np.ndarray]:
    return dtype, bf16(values) if dtype == "BF16" else values.astype(DTYPES[dtype])


def fp8_block(name: str, seed: int, rows: int, cols: int) -> Tensors:
    """A matrix of random codes, all but NaN, with random scales for blocks."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 127, (rows, cols)) + 128 * random.integers(0, 2, (rows, cols))
    scale = random.uniform(0.5, 2, (-(-rows // 128), -(-cols // 128))) / 448
    return {
        name: ("F8_E4M3", codes.astype(np.uint8)),
        name + "_scale_inv": ("F32", scale.astype(np.float32)),
    }


def fp8_channel(name: str, seed: int, rows: int, cols: int, dtype: str = "BF16") -> Tensors:
    """A matrix of random codes with a random scale for each row."""
    codes = fp8_block(name, seed, rows, cols)[name]
    scale = np.random.default_rng(seed).uniform(0.5, 2, (rows, 1)).astype(np.float32) / 448
    return {name: codes, name + "_scale": plain(scale, dtype)}


def int4(name: str, seed: int, rows: int, cols: int, group: int = 32) -> Tensors:
    """A matrix of random nibbles with random scales of both signs for groups."""
    random = np.random.default_rng(seed)
    packed = random.integers(-(2**31), 2**31, (rows, cols // 8))
    scale = random.uniform(0.5, 2, (rows, cols // group)) * random.choice([-1, 1], (rows, 1))
    return {
        name + "_packed": ("I32", packed.astype(np.int32)),
        name + "_scale": plain(scale.astype(np.float32)),
        name + "_shape": ("I64", np.array([rows, cols], np.int64)),
    }


def mxfp4(name: str, seed: int, experts: int, outputs: int, inputs: int) -> Tensors:
    """Stacked experts of random nibbles with random exponents around 2^0."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16))
    scales = random.integers(120, 130, (experts, outputs, inputs // 32))
    return {
        name + "_blocks": ("U8", blocks.astype(np.uint8)),
        name + "_scales": ("U8", scales.astype(np.uint8)),
    }
