"""Routing and rotation of many tokens against the native functions, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native
from moechat.models.spec import MoeSpec, Rope

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.gpu_weights.rope import angles, rotate  # noqa: E402
from moechat.gpu_weights.router import route  # noqa: E402

RULES = {
    "deepseek_v3": ("sigmoid", 8, 4, True, 2.5),
    "deepseek_v2": ("softmax", 4, 2, False, 16.0),
    "one expert a group": ("sigmoid", 32, 9, True, 1.0),
    "few groups kept": ("sigmoid", 8, 2, True, 1.0),
    "qwen": ("softmax", 1, 1, True, 1.0),
    "gpt_oss": ("softmax_chosen", 1, 1, False, 1.0),
}


def logits(kind: str) -> np.ndarray:
    random = np.random.default_rng(3)
    logits_TE = random.normal(0, 2, (60, 32)).astype(np.float32)
    if kind == "ties":
        logits_TE = np.round(logits_TE)
    if kind == "few finite":  # fewer than are chosen: NaN of the kept groups, then, by their ids
        logits_TE[random.random(logits_TE.shape) < 0.8] = np.nan
    if kind == "not finite":
        chosen = random.random(logits_TE.shape)
        logits_TE[chosen < 0.2] = np.nan
        logits_TE[(chosen > 0.2) & (chosen < 0.3)] = -np.inf
        logits_TE[0] = np.nan
        logits_TE[1, 5] = np.inf
    return logits_TE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["plain", "ties", "not finite", "few finite"])
@pytest.mark.parametrize("corrected", [False, True])
def test_route(rule, kind, corrected):
    scoring, groups, kept, normalise, scaling = RULES[rule]
    moe = MoeSpec(
        num_experts=32,
        num_experts_per_token=6,
        intermediate_size=1,
        scoring=scoring,
        num_groups=groups,
        num_groups_kept=kept,
        normalise_weights=normalise,
        routed_scaling=scaling,
    )
    logits_TE, correction_E = logits(kind), None
    if corrected:
        correction_E = np.round(np.random.default_rng(4).normal(0, 0.3, 32), 1).astype(np.float32)
    ids_TK, weights_TK = route(
        moe,
        torch.from_numpy(logits_TE),
        None if correction_E is None else torch.from_numpy(correction_E),
    )
    for row, logits_E in enumerate(logits_TE):
        want_ids, want_weights = _native.route(
            logits_E, correction_E, scoring, 6, groups, kept, normalise, scaling
        )
        assert ids_TK[row].tolist() == want_ids.tolist()
        np.testing.assert_allclose(weights_TK[row].numpy(), want_weights, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate(interleaved):
    """At the start and far out, where float32 angles would be off; 4 of 12 elements stay."""
    random = np.random.default_rng(5)
    frequencies = 10000.0 ** -(np.arange(4) / 4)
    rope = Rope(
        inverse_frequencies=tuple(frequencies.tolist()), amplitude=1.25, interleaved=interleaved
    )
    for first in (0, 1_000_003):
        x_THd = random.normal(size=(5, 3, 12)).astype(np.float32)
        turned = torch.from_numpy(x_THd.copy())
        rotate(turned, angles(rope, first, 5, torch.device("cpu")))
        for token in range(5):
            for head in range(3):
                want = _native.rope(
                    x_THd[token, head, :8],
                    first + token,
                    frequencies.astype(np.float32),
                    1.25,
                    interleaved,
                )
                np.testing.assert_allclose(turned[token, head, :8].numpy(), want, atol=2e-6)
                assert (turned[token, head, 8:].numpy() == x_THd[token, head, 8:]).all()
