"""Import it before any kernel: Triton's kernels then run in its interpreter, on CPU tensors."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_indices(tensor, *args):
    """Arrays of one element as bounds of loops, which numpy 2.4 does not turn into numbers."""
    scope = _patch_lang_tensor(tensor, *args)
    place = scope if scope is not None else args[0]
    place.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    return scope


interpreter._patch_lang_tensor = _with_indices

_create_dot = interpreter.InterpreterBuilder.create_dot


def _float32(handle):
    """It keeps bfloat16 as uint16 and would multiply those."""
    if handle.dtype.scalar != interpreter.tl.bfloat16:
        return handle
    bits = handle.data.astype("uint32") << 16
    return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)


def _dot(self, a, b, *args):
    return _create_dot(self, _float32(a), _float32(b), *args)


interpreter.InterpreterBuilder.create_dot = _dot

_convert_float = interpreter._convert_float


def _rounded(values, source, target, rounding):
    """It cuts bits off where a GPU rounds to the nearest even."""
    if source != interpreter.tl.float32 or target != interpreter.tl.bfloat16:
        return _convert_float(values, source, target, rounding)
    bits = values.astype("float32").view("uint32").astype("uint64")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


interpreter._convert_float = _rounded
