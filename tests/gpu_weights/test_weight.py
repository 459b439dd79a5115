"""FP8 as stored: slices of its rows and experts are those of the decoded matrix."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.gpu_weights.products import product, tiled_product  # noqa: E402
from moechat.gpu_weights.weight import Fp8Matrix, rows_of  # noqa: E402


def random_matrix(rows: int, cols: int, block: tuple[int, int], experts: int = 2) -> Fp8Matrix:
    """Every code but the NaNs; scales of both signs."""
    random = torch.Generator().manual_seed(rows + cols)
    codes = torch.randint(0, 255, (experts, rows, cols), generator=random).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = (experts, -(-rows // block[0]), -(-cols // block[1]))
    return Fp8Matrix(codes, torch.randn(grid, generator=random), block)


def naive(weight: Fp8Matrix) -> torch.Tensor:
    """float32, an element at a time of the definition."""
    values = weight.codes.view(torch.float8_e4m3fn).float()
    rows, cols = (torch.arange(n) for n in weight.shape[-2:])
    scale = weight.scale[..., rows // weight.block[0], :]
    return values * scale[..., cols // weight.block[1]]


BLOCKS = [(128, 128), (1, 32), (300, 200), (64, 48), (1, 1000)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [slice(0, 300), slice(100, 228), slice(128, 130), slice(299, 300)])
def test_rows_and_experts(block: tuple[int, int], rows: slice) -> None:
    weight = random_matrix(300, 200, block)
    for dtype in (torch.float32, torch.bfloat16):
        expected = naive(weight).to(dtype)
        assert (weight.to_dense(dtype) == expected).all()
        part = rows_of(weight[1], rows)
        assert isinstance(part, Fp8Matrix) and part.shape == (rows.stop - rows.start, 200)
        assert (part.to_dense(dtype) == expected[1, rows]).all()
        further = rows_of(part, slice(0, 1))
        assert isinstance(further, Fp8Matrix)
        assert (further.to_dense(dtype) == expected[1, rows][:1]).all()


def test_product_rounds_inputs_alone() -> None:
    weight = random_matrix(300, 200, (128, 128))[0]
    x = torch.randn((70, 200), generator=torch.Generator().manual_seed(1))
    expected = x.bfloat16().double() @ naive(weight).double().T
    for found in (product(x, weight), tiled_product(x, weight)):
        assert found.dtype == torch.float32
        assert ((found - expected).abs() <= 1e-5 * expected.abs().max()).all()
