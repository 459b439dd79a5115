import math

import numpy as np
import pytest

from moechat.errors import ArchitectureUnsupported
from moechat.models.config_reader import ConfigReader
from moechat.models.rope import Linear, Llama3, Yarn, inverse_frequencies, read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def yarn(factor=40.0, original=4096, fast=32.0, slow=1.0, truncate=True):
    return Yarn(
        factor=factor,
        original_context_tokens=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )


def read(config, **settings):
    reader = ConfigReader({"rope_theta": 10000.0} | config)
    rope = read_rope(reader, **settings)
    reader.finish()
    return rope


def reference(dim, theta, settings):
    """YaRN in numpy float64, in the reference's own order: masks over whole arrays."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    extrapolated = 1.0 / theta**exponents
    interpolated = 1.0 / (settings.factor * theta**exponents)
    turns = np.array([settings.beta_fast, settings.beta_slow])
    edges = dim * np.log(settings.original_context_tokens / (turns * 2 * np.pi))
    low, high = edges / (2 * np.log(theta))
    if settings.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
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
        (64, 150000.0, yarn(factor=32.0, truncate=False)),
        (32, 150000.0, yarn(factor=32.0, original=256, truncate=False)),
    ],
)
def test_yarn_equals_an_independent_float64_computation(dim, theta, settings):
    got = inverse_frequencies(dim, theta, settings)
    assert len(got) == dim // 2
    np.testing.assert_allclose(got, reference(dim, theta, settings), rtol=1e-13)


def test_deepseek_v3s_own_ramp_runs_from_pair_10_to_pair_23():
    plain = np.array(inverse_frequencies(64, 1e4))
    scaled = np.array(inverse_frequencies(64, 1e4, yarn()))
    np.testing.assert_allclose(plain, 1e4 ** (-np.arange(32) / 32), rtol=1e-14)
    ratio = plain / scaled
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[23:], 40.0, rtol=1e-12)
    assert (np.diff(ratio[10:24]) > 0).all()


def test_llama3_equals_its_rule_by_wavelength():
    plain = np.array(inverse_frequencies(128, 500000.0))
    scaling = Llama3(factor=8.0, low_turns=1.0, high_turns=4.0, original_context_tokens=8192)
    got = np.array(inverse_frequencies(128, 500000.0, scaling))
    wavelength = 2 * np.pi / plain
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    blended = (1 - smooth) * plain / 8.0 + smooth * plain
    expected = np.where(wavelength > 8192, plain / 8.0, blended)
    expected = np.where(wavelength < 8192 / 4, plain, expected)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    assert got[0] == plain[0] and got[-1] == pytest.approx(plain[-1] / 8, rel=1e-14)
    assert ((got < plain) & (got > plain / 8)).any()


def test_linear_divides_all():
    got = inverse_frequencies(8, 1e4, Linear(factor=4.0))
    np.testing.assert_allclose(got, np.array(inverse_frequencies(8, 1e4)) / 4, rtol=1e-15)


def test_deepseeks_two_mscales():
    def deepseek(**changes):
        return read({"rope_scaling": YARN | {"factor": 40.0} | changes}, latent=True)

    m = 0.1 * math.log(40.0) + 1.0
    assert m == pytest.approx(1.3689, abs=5e-5)
    both = deepseek(mscale=1.0, mscale_all_dim=1.0)
    assert both.softmax_factor == pytest.approx(m * m, rel=1e-14)
    assert both.rope(64).amplitude == 1.0
    other = deepseek(mscale=0.707)
    assert other.softmax_factor == 1.0
    assert other.rope(64).amplitude == pytest.approx(0.0707 * math.log(40.0) + 1.0, rel=1e-14)
    assert deepseek().rope(64).amplitude == pytest.approx(m, rel=1e-14)
    assert deepseek(factor=1.0, mscale_all_dim=1.0).softmax_factor == 1.0


def test_yarn_of_other_families():
    m = 0.1 * math.log(4.0) + 1.0
    plain = read({"rope_scaling": YARN})
    assert plain.rope(64).amplitude == pytest.approx(m, rel=1e-14)
    assert plain.softmax_factor == 1.0
    given = read({"rope_scaling": YARN | {"attention_factor": 1.25}})
    assert given.rope(64).amplitude == 1.25
    ratio = read({"rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}})
    expected = (0.05 * math.log(4.0) + 1.0) / m
    assert ratio.rope(64).amplitude == pytest.approx(expected, rel=1e-14)
    assert ratio.softmax_factor == 1.0
    assert read({"rope_scaling": YARN | {"truncate": False}}).scaling.truncate is False


def test_yarn_stretches_the_context_but_never_shrinks_it():
    rope = read({"rope_scaling": YARN})
    assert rope.context_tokens(40960) == 131072
    assert rope.context_tokens(200000) == 200000
    assert read({"rope_scaling": LLAMA3}).context_tokens(131072) == 131072


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_both_styles_mean_the_same(scaling):
    old = read({"rope_theta": 5e5, "rope_scaling": scaling})
    new = read({"rope_theta": None, "rope_parameters": scaling | {"rope_theta": 5e5}})
    kind = scaling["rope_type"]
    named = {key: value for key, value in scaling.items() if key != "rope_type"} | {"type": kind}
    both = scaling | {"type": kind, "rope_theta": 5e5}
    assert old == new == read({"rope_theta": 500000, "rope_scaling": named})
    assert old == read({"rope_theta": 5e5, "rope_scaling": both})
    assert old.scaling is not None and old.theta == 5e5


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000}},
        {"rope_scaling": {"type": "dynamic", "factor": 1.0}},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_no_scaling(settings):
    rope = read(settings)
    assert rope.scaling is None and rope.rope(64).amplitude == 1.0
    assert rope.rope(64).inverse_frequencies == inverse_frequencies(64, 10000.0)


def test_part_of_a_head_may_be_rotated():
    new = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    for settings in ({"partial_rotary_factor": 0.5}, new, {}):
        rope = read(settings, rotated_share=0.5)
        assert rope.rope(64).inverse_frequencies == inverse_frequencies(32, 1e4)
    assert (
        len(read({"partial_rotary_factor": 0.25}, rotated_share=0.5).rope(64).inverse_frequencies)
        == 8
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4}}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "su"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "type"),
        ({"rope_scaling": {"rope_type": 1}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8e3}}, "original_max"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
        ({"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": None}}, "original_max"),
    ],
)
def test_what_is_not_implemented_is_named(settings, key):
    with pytest.raises(ArchitectureUnsupported, match=key):
        read(settings)
