"""The small vector kernels against float64, on every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
from reference import bf16_bits
from tolerances import EXP_RELATIVE, VECTOR_RELATIVE

from moechat import _native

SIZES = [1, 7, 15, 16, 17, 40, 256, 333, 7168]
INF = float("inf")


def random(size: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(isa: str, size: int, scale: float) -> None:
    x, weight = random(size, 1, scale), random(size, 2)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean() + 1e-6) * weight
    y = _native.rms_norm(x, weight, 1e-6)
    np.testing.assert_allclose(y, wanted, rtol=VECTOR_RELATIVE)


def test_rms_norm_of_zeros_is_zero(isa: str) -> None:
    zeros = np.zeros(33, np.float32)
    assert (_native.rms_norm(zeros, zeros + 1, 1e-6) == 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(isa: str, size: int) -> None:
    gate, up = random(size, 3, 8), random(size, 4)
    wide = gate.astype(np.float64)
    y = _native.silu_mul(gate, up)
    np.testing.assert_allclose(y, wide / (1 + np.exp(-wide)) * up, rtol=VECTOR_RELATIVE)


def test_silu_mul_at_the_ends(isa: str) -> None:
    gate = np.array([-1e30, -200, -0.0, 0.0, 200, 1e30, np.nan], np.float32)
    y = _native.silu_mul(gate, np.ones(7, np.float32))
    np.testing.assert_allclose(y, [0, 0, 0, 0, 200, 1e30, np.nan], atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_gelu_tanh_mul(isa: str, size: int) -> None:
    gate, up = random(size, 3, 8), random(size, 4)
    wide = gate.astype(np.float64)
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    # Where tanh is nearly -1 the definition itself cancels: the value is then below 1e-4.
    np.testing.assert_allclose(_native.gelu_tanh_mul(gate, up), gelu * up, rtol=4e-6, atol=1e-6)


def test_gelu_tanh_mul_at_the_ends(isa: str) -> None:
    gate = np.array([-1e4, -200, -0.0, 0.0, 200, 1e4, np.nan], np.float32)
    y = _native.gelu_tanh_mul(gate, np.ones(7, np.float32))
    np.testing.assert_allclose(y, [0, 0, 0, 0, 200, 1e4, np.nan], atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_swiglu_clamped(isa: str, size: int) -> None:
    gate, up = random(size, 3, 8), random(size, 4, 8)
    g = np.minimum(gate.astype(np.float64), 7)
    u = np.clip(up.astype(np.float64), -7, 7)
    wanted = (u + 1) * g / (1 + np.exp(-1.702 * g))
    y = _native.swiglu_clamped(gate, up, 7.0, 1.702)
    np.testing.assert_allclose(y, wanted, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("cap", [8.0, 50.0])
@pytest.mark.parametrize("size", SIZES)
def test_softcap(isa: str, size: int, cap: float) -> None:
    x = random(size, 9, 40)
    y = _native.softcap(x, cap)
    np.testing.assert_allclose(y, cap * np.tanh(x.astype(np.float64) / cap), atol=cap * 4e-7)
    assert np.abs(y).max() <= cap


@pytest.mark.parametrize("size", [0, *SIZES])
def test_exp_sum(isa: str, size: int) -> None:
    x = random(size, 5, 20)
    shift = _native.max(x) if size else 0.0
    y, total = _native.exp_sum(x, shift)
    # x - shift is float32 arithmetic by contract; its rounding is not the exponential's error.
    wanted = np.exp((x - np.float32(shift)).astype(np.float64))
    wanted[wanted < 2.0**-126] = 0
    np.testing.assert_allclose(y, wanted, rtol=EXP_RELATIVE, atol=2e-38)
    assert total == pytest.approx(wanted.sum(), rel=VECTOR_RELATIVE)
    assert (x == random(size, 5, 20)).all()


def test_exp_at_the_ends(isa: str) -> None:
    x = np.array([-INF, -1e5, -87.0, 0.0, 88.0, 89.0, INF] + [0.0] * 20, np.float32)
    y, total = _native.exp_sum(x, 0.0)
    np.testing.assert_allclose(y[:4], [0, 0, np.exp(-87.0), 1], rtol=EXP_RELATIVE)
    assert y[4] == pytest.approx(np.exp(88.0), rel=EXP_RELATIVE)
    assert y[5] == y[6] == total == INF
    y, total = _native.exp_sum(np.array([1.0, np.nan], np.float32), 0.0)
    assert np.isnan([y[1], total]).all() and y[0] == pytest.approx(np.e)


@pytest.mark.parametrize("size", SIZES)
def test_max(isa: str, size: int) -> None:
    x = random(size, 6)
    for place in {0, size // 2, size - 1}:
        y = x.copy()
        y[place] = 50
        assert _native.max(y) == 50
        y[place] = np.nan
        assert np.isnan(_native.max(y))
    assert _native.max(x - 100) == (x - 100).max()
    assert _native.max(x[:0]) == -INF
    assert _native.max(np.full(size, -INF, np.float32)) == -INF


def test_to_bf16(isa: str) -> None:
    bits = np.random.default_rng(7).integers(0, 2**32, 20000, np.uint32)
    # Ties, to even and to odd, and their neighbours.
    ties = np.arange(0x3F808000, 0x3F908000, 0x10000, np.uint32)
    x = np.concatenate([bits, ties - 1, ties, ties + 1]).view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.array([0.0, -0.0, INF, -INF, 3.4e38], np.float32)])
    np.testing.assert_array_equal(_native.to_bf16(x), bf16_bits(x))
    nan = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF] * 9, np.uint32).view(np.float32)
    as_float = (_native.to_bf16(nan).astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(as_float).all()


def test_repeated_runs_agree_to_the_bit(isa: str) -> None:
    x, weight = random(333, 8), random(333, 9)
    assert (
        _native.rms_norm(x, weight, 1e-6).tobytes() == _native.rms_norm(x, weight, 1e-6).tobytes()
    )
    shifted = np.empty(334, np.float32)[1:]  # another alignment
    shifted[:] = x
    assert _native.exp_sum(x, 1.0)[1] == _native.exp_sum(shifted, 1.0)[1]


def test_arguments_are_checked() -> None:
    x = random(8, 10)
    for wrong in [x[::2], x.reshape(2, 4), x.astype(np.float64), x.astype(">f4")]:
        for call in (_native.max, _native.to_bf16, lambda v: _native.exp_sum(v, 0.0)):
            with pytest.raises(_native.NativeError, match="contiguous float32 vector"):
                call(wrong)
    with pytest.raises(_native.NativeError, match="same size"):
        _native.rms_norm(x, x[:7], 1e-6)
    with pytest.raises(_native.NativeError, match="same size"):
        _native.silu_mul(x, x[:7])
