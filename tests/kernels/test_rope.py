"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native


def frequencies(pairs: int) -> np.ndarray:
    return (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32)


@pytest.mark.parametrize("pairs", [1, 3, 32])
@pytest.mark.parametrize("position", [0, 1, 4095, 163839, 10_000_000])
@pytest.mark.parametrize("amplitude", [1.0, 1.25])
def test_matches_complex_rotation(pairs: int, position: int, amplitude: float) -> None:
    x = np.random.default_rng(pairs).standard_normal(2 * pairs).astype(np.float32)
    y = _native.rope(x, position, frequencies(pairs), amplitude)
    angles = position * frequencies(pairs).astype(np.float64)
    wanted = x.astype(np.float64).view(np.complex128) * amplitude * np.exp(1j * angles)
    # Three roundings, relative to the length of the pair.
    error = np.abs(y.astype(np.float64).view(np.complex128) - wanted)
    assert (error <= 4 * 2.0**-24 * np.abs(wanted)).all()


def test_halves_are_pairs_taken_apart() -> None:
    x = np.random.default_rng(3).standard_normal(12).astype(np.float32)
    pairs_first = np.ascontiguousarray(x.reshape(2, 6).T).reshape(-1)
    wanted = _native.rope(pairs_first, 77, frequencies(6), 1.25)
    y = _native.rope(x, 77, frequencies(6), 1.25, interleaved=False)
    np.testing.assert_array_equal(y, wanted.reshape(6, 2).T.reshape(-1))


def test_position_zero_changes_nothing_and_the_input_is_left_alone() -> None:
    x = np.arange(8, dtype=np.float32)
    assert (_native.rope(x, 0, frequencies(4), 1.0) == x).all()
    _native.rope(x, 5, frequencies(4), 1.0)
    assert (x == np.arange(8)).all()


def test_scores_depend_on_the_distance_alone() -> None:
    generator = np.random.default_rng(1)
    q, k = generator.standard_normal((2, 64)).astype(np.float32)
    scores = [
        np.dot(
            _native.rope(q, start + 7, frequencies(32), 1.0),
            _native.rope(k, start, frequencies(32), 1.0),
        )
        for start in (0, 100, 50_000)
    ]
    np.testing.assert_allclose(scores, scores[0], atol=2e-5)


def test_sizes_must_fit() -> None:
    with pytest.raises(_native.NativeError, match="two values"):
        _native.rope(np.zeros(6, np.float32), 1, frequencies(4), 1.0)
