"""Inputs as e4m3 codes: by groups, to within half a step of a code, and where they may be so."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from test_weight import naive, random_matrix  # noqa: E402

from moechat.gpu_weights.inputs import can_quantise, quantise  # noqa: E402
from moechat.gpu_weights.products import product, tiled_product  # noqa: E402


def test_groups_have_scales_of_their_own() -> None:
    x = torch.randn((5, 300), generator=torch.Generator().manual_seed(1))
    x[:, 128:256] *= 1000
    x = x.bfloat16().float()
    x[1, 256:] = 0
    x[2, 7] = torch.nan
    codes = quantise(x)
    assert codes.scale.shape == (5, 3) and codes.values.shape == (5, 300)
    found = codes.to_dense()
    assert found[2, :128].isnan().all() and not found[2, 128:].isnan().any()
    assert (found[1, 256:] == 0).all()
    good = torch.ones(5, 300, dtype=torch.bool)
    good[2, :128] = False
    error = (found - x).abs()[good]
    group = x.nan_to_num().abs()
    largest = torch.cat(
        [group[:, i : i + 128].amax(1, keepdim=True).expand(-1, min(128, 300 - i))
         for i in (0, 128, 256)], 1
    )[good]  # fmt: skip
    # Three bits of mantissa; below 2^-6 of the code's range a fixed step.
    bound = torch.maximum(x.abs()[good] * 2.0**-4, largest / 448 * 2.0**-10)
    assert (error <= bound * 1.0001).all() and error.max() > 0
    top = (x.abs() == largest.new_tensor(float(x.nan_to_num().abs().max()))).nonzero()[0]
    assert abs(found[tuple(top)] / x[tuple(top)] - 1) < 1e-6


def test_products_take_codes_where_the_weight_says_so() -> None:
    weight = random_matrix(300, 200, (128, 128))[0]
    x = torch.randn((70, 200), generator=torch.Generator().manual_seed(1))
    coded = dataclasses.replace(weight, quantised_inputs=True)
    expected = quantise(x).to_dense().double() @ naive(weight).double().T
    for found in (product(x, coded), tiled_product(x, coded)):
        assert ((found - expected).abs() <= 1e-5 * expected.abs().max()).all()
    plain = product(x, weight)
    relative = float((plain - expected).abs().max() / expected.abs().max())
    assert 1e-3 < relative < 0.1
    assert coded.rows(slice(3, 5)).quantised_inputs


@pytest.mark.parametrize(
    ("block", "inputs", "can"),
    [
        ((128, 128), 7168, True),
        ((1, 7168), 7168, True),
        ((1, 32), 64, False),
        ((1, 384), 768, True),
    ],
)
def test_groups_lie_in_blocks(block: tuple[int, int], inputs: int, can: bool) -> None:
    assert can_quantise(block, inputs) is can
