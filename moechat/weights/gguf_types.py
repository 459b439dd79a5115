"""GGUF's element types: what they are called and how many bytes their blocks take.

Facts of the format's public description (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class GGUFType(NamedTuple):
    """An element type; ``block_elements`` consecutive elements of a row take ``block_bytes``."""

    name: str
    block_elements: int
    block_bytes: int


# By the number that files store. Types that moechat cannot compute with are here so that a file
# which holds one can be opened and the error names it.
TYPES = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    2: GGUFType("Q4_0", 32, 18),
    3: GGUFType("Q4_1", 32, 20),
    6: GGUFType("Q5_0", 32, 22),
    7: GGUFType("Q5_1", 32, 24),
    8: GGUFType("Q8_0", 32, 34),
    9: GGUFType("Q8_1", 32, 36),
    10: GGUFType("Q2_K", 256, 84),
    11: GGUFType("Q3_K", 256, 110),
    12: GGUFType("Q4_K", 256, 144),
    13: GGUFType("Q5_K", 256, 176),
    14: GGUFType("Q6_K", 256, 210),
    15: GGUFType("Q8_K", 256, 292),
    16: GGUFType("IQ2_XXS", 256, 66),
    17: GGUFType("IQ2_XS", 256, 74),
    18: GGUFType("IQ3_XXS", 256, 98),
    19: GGUFType("IQ1_S", 256, 50),
    20: GGUFType("IQ4_NL", 32, 18),
    21: GGUFType("IQ3_S", 256, 110),
    22: GGUFType("IQ2_S", 256, 82),
    23: GGUFType("IQ4_XS", 256, 136),
    24: GGUFType("I8", 1, 1),
    25: GGUFType("I16", 1, 2),
    26: GGUFType("I32", 1, 4),
    27: GGUFType("I64", 1, 8),
    28: GGUFType("F64", 1, 8),
    29: GGUFType("IQ1_M", 256, 56),
    30: GGUFType("BF16", 1, 2),
    34: GGUFType("TQ1_0", 256, 54),
    35: GGUFType("TQ2_0", 256, 66),
    39: GGUFType("MXFP4", 32, 17),
    40: GGUFType("NVFP4", 64, 36),
    41: GGUFType("Q1_0", 128, 18),
    42: GGUFType("Q2_0", 64, 18),
}
BY_NAME = {type_.name: type_ for type_ in TYPES.values()}

# numpy's type for elements that are no blocks; bits where numpy has no equal, as for safetensors.
PLAIN_DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.uint16,
    "BF16": np.uint16,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F64": np.float64,
}
