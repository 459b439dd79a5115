"""GGUF files of random weights with the shapes of real Mixture-of-Experts models, cut in depth.

    pip install gguf==0.19.0
    python docs/benchmarks/synthetic_gguf.py FOLDER [--cut a|b] [--type q8_0|q4_k_m] [--experts N]

Cut a is Qwen3-30B-A3B's first 6 layers, cut b DeepSeek-V3 with 2 layers and 64 of its 256 experts;
both with a byte-level vocabulary of 32,768. Writes FOLDER/CUT-TYPE.gguf, all four unless told
which: 4.1 and 2.3 GB for a, 7.0 and 4.0 GB for b. Blocks are drawn as they are stored, with no
float weights before them, so that every program reads the same numbers; a matrix keeps the variance
of its input, as trained ones do.

Block layouts are ggml's (docs/gguf.md and ggml-common.h of github.com/ggml-org/ggml).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf_cuts import CUTS, VOCABULARY, Cut, Tensor, tensors_of
from numpy.typing import NDArray
from pipe import run

MERGES = ("t h", "h e", "i n", "e r", "a n", "r e", "o n", "Ġ t", "Ġ a", "th e")
NORMAL, CONTROL, UNUSED = 1, 3, 5
CHUNK_BYTES = 64 << 20
MORE_BITS = ("attn_v.", "ffn_down_exps.", "ffn_down_shexp.")
ALIGNMENT_BYTES = 32
FILE_TYPES = {"q8_0": 7, "q4_k_m": 15}  # llama.cpp's numbers of what most tensors are
Bytes = NDArray[np.uint8]


def block_type(tensor: Tensor, cut: Cut, file_type: str) -> str:
    """GGUF's type of a tensor; for q4_k_m what ``llama-quantize --dry-run`` of llama.cpp chooses.

    (llama-cpp-python 0.3.36's tree.) The head has 6 bits, and so have the values' projection and
    the down projections in some layers: the first and last eighth, and every third between. Rows
    that K-quants' blocks of 256 do not fit have Q5_0.
    """
    if tensor.kind != "weight":
        return "F32"
    if file_type == "q8_0":
        return "Q8_0"
    if tensor.name == "output.weight":
        return "Q6_K"
    if tensor.shape[0] % 256:
        return "Q5_0"
    if tensor.name.startswith("blk.") and any(part in tensor.name for part in MORE_BITS):
        layer, eighth = int(tensor.name.split(".")[1]), cut.layers // 8
        if not eighth <= layer < 7 * cut.layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def byte_tokens() -> list[str]:
    """GPT-2's printable names of the 256 bytes: bytes without a glyph are moved up from 256."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in shown)
    names = {byte: 256 + index for index, byte in enumerate(hidden)}
    return [chr(names.get(byte, byte)) for byte in range(256)]


def vocabulary(cut: Cut) -> tuple[list[str], list[int]]:
    """Tokens and their types: bytes, ten merges, control tokens, and unused ones for the rest."""
    tokens = byte_tokens() + [merge.replace(" ", "") for merge in MERGES]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(cut.control)
    tokens += cut.control
    tokens += [f"<unused{index}>" for index in range(len(tokens), VOCABULARY)]
    return tokens, types + [UNUSED] * (VOCABULARY - len(types))


def float16_bytes(value: float) -> Bytes:
    """The two bytes of a float16."""
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def random_blocks(
    type_: str, count: int, deviation: float, generator: np.random.Generator
) -> Bytes:
    """Random uint8 [count, bytes of a block] whose values have this standard deviation and mean 0.

    Codes are uniform, so their own deviation follows from their number: sqrt((n^2 - 1) / 12).
    """
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][1]
    blocks = generator.integers(0, 256, (count, size), np.uint8)
    if type_ == "Q8_0":  # scale, 32 signed bytes
        blocks[blocks == 0x80] = 0x81  # -128, which no quantiser writes
        blocks[:, :2] = float16_bytes(deviation / 73.3)
    elif type_ == "Q5_0":  # scale, fifth bits, nibbles: scale * (code - 16)
        blocks[:, :2] = float16_bytes(deviation / 9.23)
    elif type_ == "Q4_K":  # two scales, 8 pairs of 6-bit numbers in 12 bytes, nibbles
        # scale * a * code - low * b with b = a and low = 7.5 * scale: centred like trained weights.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
        scale = deviation / (36.5 * 4.61)  # rms of a, deviation of the code
        blocks[:, :2], blocks[:, 2:4] = float16_bytes(scale), float16_bytes(7.5 * scale)
    elif (
        type_ == "Q6_K"
    ):  # nibbles, pairs of bits, 16 signed scales, scale of those: a * (code - 32)
        blocks[:, 208:] = float16_bytes(deviation / (73.9 * 18.5))
    else:
        raise ValueError(f"no random blocks of {type_}")
    return blocks


def contents(tensor: Tensor, type_: str, generator: np.random.Generator) -> Iterator[bytes]:
    """A tensor's bytes, some at a time."""
    elements = math.prod(tensor.shape)
    deviation = 1 / math.sqrt(tensor.shape[0])
    if tensor.kind == "router":
        values = generator.standard_normal(elements, np.float32) * np.float32(deviation)
        yield values.tobytes()
    elif tensor.kind != "weight":
        yield np.full(elements, float(tensor.kind == "norm"), np.float32).tobytes()
    else:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
        for begin in range(0, elements // block, CHUNK_BYTES // size):
            count = min(CHUNK_BYTES // size, elements // block - begin)
            yield random_blocks(type_, count, deviation, generator).tobytes()


def write_header(path: Path, name: str, cut: Cut, file_type: str) -> None:
    """Everything before the tensors' bytes."""
    writer = gguf.GGUFWriter(path, cut.architecture)
    common = {
        "block_count": cut.layers,
        "embedding_length": cut.hidden,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_used_count": 8,
    }
    for key, value in {**common, **cut.metadata}.items():
        key = f"{cut.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    tokens, types = vocabulary(cut)
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut.pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index(cut.control[0]))
    writer.add_eos_token_id(tokens.index(cut.control[1]))
    writer.add_pad_token_id(tokens.index(cut.control[2]))
    writer.add_add_bos_token(cut.add_bos)
    writer.add_chat_template(cut.template)
    for tensor in tensors_of(cut):
        number = gguf.GGMLQuantizationType[block_type(tensor, cut, file_type)]
        block, size = gguf.GGML_QUANT_SIZES[number]
        rows = tuple(reversed(tensor.shape))
        writer.add_tensor_info(
            tensor.name,
            rows if number == 0 else (*rows[:-1], rows[-1] // block * size),
            np.dtype(np.float32 if number == 0 else np.uint8),
            math.prod(rows) // block * size,
            raw_dtype=number,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write(path: Path, name: str, cut: Cut, file_type: str, seed: int) -> None:
    """A whole file; nothing is left at ``path`` unless it is complete."""
    partial = path.with_suffix(".part")
    generator = np.random.Generator(np.random.SFC64(seed))
    try:
        write_header(partial, name, cut, file_type)
        with partial.open("ab") as file:
            for tensor in tensors_of(cut):
                file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
                for piece in contents(tensor, block_type(tensor, cut, file_type), generator):
                    file.write(piece)
            file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
            os.fsync(file.fileno())  # the disk must be idle while others are measured
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    """Write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cut", choices=CUTS, action="append")
    parser.add_argument("--type", choices=FILE_TYPES, action="append")
    parser.add_argument("--experts", type=int, help="instead of 128 (a) and 64 (b)")
    parser.add_argument("--seed", type=int, default=4)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for letter in arguments.cut or CUTS:
        make, experts = CUTS[letter]
        for file_type in arguments.type or FILE_TYPES:
            cut = make(arguments.experts or experts)
            path = arguments.folder / f"{letter}-{file_type}.gguf"
            write(path, f"synthetic {cut.architecture} {letter}", cut, file_type, arguments.seed)
            parameters = sum(math.prod(tensor.shape) for tensor in tensors_of(cut))
            print(f"{path}: {parameters:,} parameters, {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    run(main)
