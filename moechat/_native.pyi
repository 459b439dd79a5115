"""Typed face of the C++ extension; tests/conventions checks that it names what the module has."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

class NativeError(RuntimeError):
    """args = (stable name, message)."""

def supported_instruction_sets() -> list[str]: ...
def active_instruction_set() -> str: ...
def force_instruction_set(name: str) -> None: ...
def available_cpus() -> int: ...

class MatrixView:
    def __init__(
        self,
        format: str,
        data: NDArray[Any],
        scale: NDArray[Any] | None = None,
        block: tuple[int, int] = (128, 128),
        row_origin: int = 0,
        col_origin: int = 0,
        *,
        cols: int | None = None,
        scale_type: str | None = None,
        zeros: Int32 | None = None,
        group_index: Int32 | None = None,
        transposed: bool = False,
        col_step: int = 1,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def format(self) -> str: ...
    def row_slice(self, begin: int, count: int) -> MatrixView: ...
    def col_slice(self, begin: int, count: int) -> MatrixView: ...

def gemv(
    view: MatrixView,
    x: Float32,
    compute: str,
    begin: int = 0,
    end: int = -1,
    out: Float32 | None = None,
) -> Float32: ...
def gemm(
    view: MatrixView,
    x: Float32,
    compute: str,
    begin: int = 0,
    end: int = -1,
    out: Float32 | None = None,
) -> Float32: ...
def gemv_transposed(
    view: MatrixView,
    x: Float32,
    compute: str,
    begin: int = 0,
    end: int = -1,
    out: Float32 | None = None,
) -> Float32: ...
def multiply(
    view: MatrixView,
    x: Float32,
    compute: str,
    begin: int = 0,
    end: int = -1,
    out: Float32 | None = None,
) -> Float32: ...
def multiply_transposed(
    view: MatrixView,
    x: Float32,
    compute: str,
    begin: int = 0,
    end: int = -1,
    out: Float32 | None = None,
) -> Float32: ...
def decode_row(view: MatrixView, row: int) -> Float32: ...
def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32: ...
def silu_mul(gate: Float32, up: Float32) -> Float32: ...
def exp_sum(x: Float32, shift: float) -> tuple[Float32, float]: ...
def max(x: Float32) -> float: ...
def to_bf16(x: Float32) -> NDArray[np.uint16]: ...
def route(
    logits: Float32,
    bias: Float32,
    experts_per_token: int,
    num_groups: int,
    groups_kept: int,
    normalise_weights: bool,
    routed_scaling: float,
) -> tuple[Int32, Float32]: ...
def rope(x: Float32, position: int, inverse_frequencies: Float32, amplitude: float) -> Float32: ...
def read_checksum(array: NDArray[Any], begin_byte: int, end_byte: int) -> int: ...

class CancelFlag:
    def __init__(self) -> None: ...
    def raise_(self) -> None: ...
    def clear(self) -> None: ...
    @property
    def raised(self) -> bool: ...

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Model:
    def __init__(
        self,
        dims: dict[str, Any],
        rope_inverse_frequencies: Sequence[float],
        num_layers: int,
        compute: str,
        weights: dict[str, Any],
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...

class KVCache:
    def __init__(self, num_layers: int, width: int, compute: str) -> None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def num_slots(self, layer: int) -> int: ...
    def append(self, layer: int, positions: Int32, rows: NDArray[Any]) -> None: ...
    def read(self, layer: int, begin: int, end: int) -> NDArray[Any]: ...
    def positions(self, layer: int, begin: int, end: int) -> Int32: ...
    def truncate(self, position: int) -> None: ...

class DecodeStep:
    def __init__(self, model: Model, pool: ThreadPool) -> None: ...
    def run(
        self, model: Model, rows: Sequence[tuple[KVCache, Int32, int, bool]]
    ) -> list[Float32]: ...

def experts(
    model: Model, pool: ThreadPool, layer: int, x: Float32, ids: Int32, weights: Float32
) -> Float32: ...

class Prefill:
    def __init__(
        self, model: Model, pool: ThreadPool, cache: KVCache, tokens: Int32, prefix: int
    ) -> None: ...
    def run_layer(
        self, cancel: CancelFlag, window: int = 0
    ) -> tuple[NDArray[Any], Float32 | None] | None: ...
    def logits(self, cancel: CancelFlag, first: int) -> Float32 | None: ...
    @property
    def next_layer(self) -> int: ...
    @property
    def router_ids(self) -> Int32: ...
    @property
    def hidden(self) -> Float32: ...

class Sampler:
    def __init__(
        self,
        *,
        vocab: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        seed: int,
    ) -> None: ...
    @property
    def vocab(self) -> int: ...
    def add_context(self, ids: Int32) -> None: ...
    def sample(self, logits: Float32, position: int) -> int: ...
    def accept(self, id: int) -> None: ...

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> Sequence[int]: ...

class TokenQueue:
    def __init__(self) -> None: ...
    def close(self) -> None: ...
    def pop(self, timeout_seconds: float) -> tuple[list[tuple[int, float]], bool]: ...

class Generation:
    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        queue: TokenQueue,
        cancel: CancelFlag,
        token: int,
        position: int,
        max_tokens: int,
        context_tokens: int,
        end_ids: Sequence[int],
    ) -> None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def position(self) -> int: ...

def generate(
    step: DecodeStep, model: Model, generations: Sequence[Generation], interrupt: CancelFlag
) -> None: ...
