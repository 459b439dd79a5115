"""Triton's kernels on CPU tensors, one program after the other, for tests without a GPU.

Import before any module with kernels, in a process of its own: kernels are made for the interpreter
or for a GPU when they are defined. What the interpreter of triton 3.6 gets wrong is put right here:
products of BF16, conversions of NaN and of halves, bounds of loops with numpy 2.4.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_patch_tensor = interpreter._patch_lang_tensor
_plain_dot = interpreter.InterpreterBuilder.create_dot


def _patched(tensor: type, scope: object) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert(values: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    """Unsigned integers of the bits, as the interpreter wants them."""
    bits = np.ascontiguousarray(values).view(f"i{source.primitive_bitwidth // 8}")
    tensor = torch.from_numpy(bits).view(_INTEGERS[source.primitive_bitwidth])
    there = tensor.view(_TYPES[source]).to(_TYPES[target])
    whole = there.view(_INTEGERS[target.primitive_bitwidth]).numpy()
    return whole.view(f"u{target.primitive_bitwidth // 8}").reshape(values.shape)


def _dot(self, a, b, d, *settings):  # type: ignore[no-untyped-def]
    a, b = (
        interpreter.TensorHandle(
            _convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32), tl.float32
        )
        for x in (a, b)
    )
    return _plain_dot(self, a, b, d, *settings)


interpreter._patch_lang_tensor = _patched
interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_dot = _dot
