import numpy as np
import pytest

from moechat.models.deepseek_v3.rope import Yarn, inverse_frequencies


def yarn(factor=40.0, original=4096, fast=32.0, slow=1.0, mscale=1.0, all_dim=1.0):
    return Yarn(factor, original, fast, slow, mscale, all_dim)


def reference(dim, theta, settings):
    """YaRN in numpy float64, in the reference's own order: masks over whole arrays."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    extrapolated = 1.0 / theta**exponents
    interpolated = 1.0 / (settings.factor * theta**exponents)
    turns = np.array([settings.beta_fast, settings.beta_slow])
    edges = dim * np.log(settings.original_context_tokens / (turns * 2 * np.pi))
    edges /= 2 * np.log(theta)
    low, high = max(np.floor(edges[0]), 0), min(np.ceil(edges[1]), dim - 1)
    if low == high:
        high += 0.001
    keep = 1.0 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return interpolated * (1 - keep) + extrapolated * keep


@pytest.mark.parametrize(
    ("dim", "theta", "settings"),
    [
        (64, 1e4, yarn()),
        (16, 1e4, yarn(original=512)),
        (16, 1e4, yarn(factor=4.0, original=64)),
        (64, 5e4, yarn(factor=32.0, fast=1.0, slow=1.0)),
        (2, 1e4, yarn(original=7, fast=1.0, slow=1.0)),
        (8, 1e4, yarn(original=1_000_000_000)),
    ],
)
def test_frequencies_equal_an_independent_float64_computation(dim, theta, settings):
    got = inverse_frequencies(dim, theta, settings)
    assert len(got) == dim // 2
    np.testing.assert_allclose(got, reference(dim, theta, settings), rtol=1e-13)


def test_deepseek_v3s_own_ramp_runs_from_pair_10_to_pair_23():
    plain = np.array(inverse_frequencies(64, 1e4, None))
    scaled = np.array(inverse_frequencies(64, 1e4, yarn()))
    np.testing.assert_allclose(plain, 1e4 ** (-np.arange(32) / 32), rtol=1e-14)
    ratio = plain / scaled
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[23:], 40.0, rtol=1e-12)
    assert (np.diff(ratio[10:24]) > 0).all()


def test_both_mscales_of_deepseek_v3():
    settings = yarn()
    m = 0.1 * np.log(40.0) + 1.0
    assert m == pytest.approx(1.3689, abs=5e-5)
    assert settings.softmax_factor == pytest.approx(m * m, rel=1e-14)
    assert settings.amplitude == 1.0


def test_mscales_that_differ():
    settings = yarn(mscale=0.707, all_dim=0.0)
    assert settings.softmax_factor == 1.0
    assert settings.amplitude == pytest.approx(0.0707 * np.log(40.0) + 1.0, rel=1e-14)
    assert yarn(factor=1.0).softmax_factor == 1.0
