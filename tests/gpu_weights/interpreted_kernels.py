"""Products and experts by kernels, interpreted; test_triton_kernels.py runs this file."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton_interpreter  # noqa: F401  # before any kernel
from test_weight import naive, random_matrix

from moechat.gpu_weights import inputs, products, triton_decode, triton_gemm, triton_inputs
from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.triton_combine import combine
from moechat.gpu_weights.triton_gemm import Gated, gemm, linear, tile_list, tiling
from moechat.gpu_weights.weight import Fp8Matrix, scale_blocks
from moechat.prefill.gpu import activations, experts
from moechat.prefill.gpu.host_copy import HostCopies
from moechat.prefill.gpu.source import ExpertGroup

CPU = torch.device("cpu")
BLOCKS = [(128, 128), (1, 32), (64, 48), (300, 200), (1, 1000)]


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-6) -> bool:
    """Within float32's rounding of sums of this size; NaN where it is NaN."""
    limit = bound * float(expected.nan_to_num().abs().max())
    error = (found.float() - expected).nan_to_num().abs().max()
    return bool((found.isnan() == expected.isnan()).all()) and float(error) <= limit


@pytest.fixture(params=["native", "by bits"])
def fp8_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gemm, "_native_fp8", lambda device: request.param == "native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(128, 128), (32, 256), (300, 200), (1000, 128)])
def test_decoded_codes_have_the_bits_of_the_definition(
    block: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every code, NaN too; rows and columns that fill no tile."""
    experts, rows, cols = 2, 300, 200
    codes = (torch.arange(experts * rows * cols) * 7 % 256).to(torch.uint8)
    codes = codes.view(experts, rows, cols)
    grid = -(-rows // block[0]), -(-cols // block[1])
    scale = torch.rand((experts, *grid), generator=torch.Generator().manual_seed(3)) + 0.01
    assert triton_decode.fits(block, rows, cols)
    found = torch.empty(codes.shape, dtype=dtype)
    triton_decode.decode_fp8(codes, scale, block, found)
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    scale_blocks(expected, scale, block)
    assert expected.isnan().sum() > 100
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("block", BLOCKS)
def test_rows_of_many_matrices(block: tuple[int, int], fp8_type: None) -> None:
    weight = random_matrix(300, 200, block, 4)
    weight.codes[2, 7, 9], weight.codes[3, 8, 0] = 0x7F, 0xFF
    weight.codes[0, 0, :8] = torch.arange(8)  # zero and what is below the normal ones
    x = torch.randn((50, 200), generator=torch.Generator().manual_seed(3))
    x = (x * 10.0 ** torch.arange(-25, 25)[:, None]).bfloat16()  # far beyond float16
    bounds = [0, 20, 20, 21, 45]
    how = tiling(weight, 10)
    assert how is not None
    tiles = tile_list(bounds, how.rows, CPU)
    tokens = torch.arange(49, 4, -1)
    bias = torch.randn(4, 300)
    halves = triton_gemm.inputs_of(weight, x)
    out = gemm(halves, weight, tiles, how, torch.zeros(45, 300), tokens_R=tokens, bias=bias)
    for number in range(4):
        rows = slice(bounds[number], bounds[number + 1])
        expected = x[tokens[rows]].double() @ naive(weight)[number].double().T + bias[number]
        for found, row in zip(out[rows], expected.float()):
            assert close(found, row)


@pytest.mark.parametrize("rows", [slice(0, 300), slice(100, 228), slice(192, 200)])
def test_rows_amidst_a_block(rows: slice) -> None:
    weight = random_matrix(300, 256, (128, 128))[1]
    x = torch.randn((70, 256), generator=torch.Generator().manual_seed(3))
    out = linear(x, weight.rows(rows))
    assert out is not None and out.dtype == torch.float32
    assert close(out, (x.bfloat16().double() @ naive(weight)[rows].double().T).float())


def test_bits_of_a_row_are_its_own() -> None:
    weight = random_matrix(200, 320, (128, 128))[0]
    x = torch.randn((150, 320), generator=torch.Generator().manual_seed(3))
    whole = linear(x, weight)
    assert whole is not None
    for begin, end in ((0, 1), (77, 150), (149, 150)):
        part = linear(x[begin:end], weight)
        assert part is not None and (part == whole[begin:end]).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_bfloat16_of_any_strides(transposed: bool) -> None:
    random = torch.Generator().manual_seed(4)
    stored = torch.randn((3, 70, 96) if transposed else (3, 2 * 96, 70), generator=random)
    stored = stored.bfloat16()
    weight = stored.transpose(1, 2) if transposed else stored[:, 1::2]
    x = torch.randn((20, 70), generator=random).bfloat16()
    how = tiling(weight, 10)
    assert how is not None
    tiles = tile_list([0, 5, 5, 20], how.rows, CPU)
    out = gemm(x, weight, tiles, how, torch.zeros(20, 96))
    for number, rows in ((0, slice(0, 5)), (2, slice(5, 20))):
        assert close(out[rows], x[rows].float() @ weight[number].float().T)


def spec_of(activation: str) -> SimpleNamespace:
    limit, alpha = (0.5, 1.7) if activation == "swiglu_clamped" else (0.0, 0.0)
    return SimpleNamespace(activation=activation, activation_limit=limit, activation_alpha=alpha)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_activations_with_the_product(activation: str) -> None:
    spec, weight = spec_of(activation), random_matrix(100, 64, (128, 128))[0]
    random = torch.Generator().manual_seed(5)
    x, gate = torch.randn((9, 64), generator=random) / 50, torch.randn((9, 100), generator=random)
    gated = Gated(activation, gate, spec.activation_alpha, spec.activation_limit)
    found = linear(x, weight, gated=gated)
    expected = activate(spec, gate.clone(), products.product(x, weight))
    assert found is not None and close(found, expected, 1e-5)


def test_pairs_join_in_order_and_others_stay() -> None:
    random = torch.Generator().manual_seed(6)
    places = torch.tensor([[0, 3, 8], [1, 2, 9], [4, 10, 11], [5, 6, 7]], dtype=torch.int32)
    branch, weights = torch.randn((3, 40), generator=random), torch.randn(12, generator=random)
    before = torch.randn((4, 40), generator=random)
    out = before.clone()
    combine(branch, weights, places, 2, out)  # pairs 2, 3, 4
    for token, place in ((1, 2), (0, 3), (2, 4)):
        before[token] += weights[place] * branch[place - 2]
    assert (out - before).abs().max() <= 1e-6 and (out[3] == before[3]).all()


@pytest.mark.parametrize("fp8", [True, False])
def test_groups_and_turns_do_not_show(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it against the loop over experts, and bit for bit over every cut."""
    num_experts, hidden, width, tokens = 5, 96, 40, 12
    random = torch.Generator().manual_seed(7)
    stacks = [
        random_matrix(rows, cols, (32, 32), num_experts)
        for rows, cols in ((width, hidden), (width, hidden), (hidden, width))
    ]
    if not fp8:
        stacks = [stack.to_dense(torch.bfloat16) for stack in stacks]
    x = (torch.randn((tokens, hidden), generator=random) / 40).bfloat16()
    ids = torch.rand((tokens, num_experts), generator=random).argsort(1)[:, :3]
    weights = torch.rand((tokens, 3), generator=random)
    grouped = experts.group_tokens(ids, weights, num_experts, HostCopies())
    biases = torch.randn((2, num_experts, width), generator=random)

    def group(first: int, last: int) -> ExpertGroup:
        def some(stack):  # type: ignore[no-untyped-def]
            if isinstance(stack, Fp8Matrix):
                return Fp8Matrix(stack.codes[first:last], stack.scale[first:last], stack.block)
            return stack[first:last]

        return ExpertGroup(
            first, *map(some, stacks), gate_bias=biases[0, first:last],
            up_bias=biases[1, first:last],
        )  # fmt: skip

    def all_of(cuts: list[int]) -> torch.Tensor:
        out = torch.zeros(tokens, hidden)
        for first, last in itertools.pairwise(cuts):
            experts.add_experts(spec_of("silu"), group(first, last), x, grouped, out)
        return out

    expected = all_of([0, 5])
    monkeypatch.setattr(experts, "gemm_kernels", lambda device: triton_gemm)
    monkeypatch.setattr(experts, "product", None)  # what the loop would use
    whole = all_of([0, 5])
    # The hidden state of an expert is rounded to BF16: sums in another order may round otherwise.
    assert close(whole, expected, 2.0**-8)
    for rows in (7, 64):
        monkeypatch.setattr(activations, "WORK_BYTES", rows * activations.pair_bytes(hidden, width))
        for cuts in ([0, 5], [0, 1, 3, 5]):
            assert (all_of(cuts) == whole).all()


def test_halves_are_the_definition() -> None:
    x = torch.randn((9, 3000), generator=torch.Generator().manual_seed(8))
    x[1], x[2, 0], x[3, 0], x[4] = 0, torch.inf, torch.nan, x[4] * 1e-39
    x[5], x[6], x[7, 0] = x[5] * 1e30, x[6] * 2.0**-100, 3e38
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = triton_inputs.halve(x.to(dtype)), inputs.halve(x)
        finite = [0, 1, 4, 5, 6, 7]
        assert (found.scale[finite] == expected.scale[finite]).all()
        assert (found.values[finite] == expected.values[finite]).all()
        assert (found.values[2:4].isfinite() == expected.values[2:4].isfinite()).all()
        exact = found.values.float() * found.scale[:, None] == x.bfloat16().float()
        assert exact[[0, 1, 5, 6]].all() and not exact[3, 0]


@pytest.mark.parametrize("num_inputs", [256, 200, 2000])
def test_codes_of_inputs_are_the_definition(num_inputs: int) -> None:
    x = torch.randn((9, num_inputs), generator=torch.Generator().manual_seed(8)).bfloat16()
    x[1, 128:] = 0
    x[2] *= 1e-30
    found, expected = triton_inputs.quantise(x), inputs.quantise(x)
    assert (found.scale == expected.scale).all()
    assert (found.values.view(torch.uint8) == expected.values.view(torch.uint8)).all()


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (1, 1000)])
def test_codes_times_codes(block: tuple[int, int]) -> None:
    weight = dataclasses.replace(random_matrix(300, 320, block, 3), quantised_inputs=True)
    x = torch.randn((50, 320), generator=torch.Generator().manual_seed(3)).bfloat16()
    x[:, :128] *= 100
    bounds, tokens = [0, 20, 21, 45], torch.arange(49, 4, -1)
    how = tiling(weight, 10)
    assert how is not None
    codes = triton_gemm.inputs_of(weight, x)
    tiles = tile_list(bounds, how.rows, CPU)
    out = gemm(codes, weight, tiles, how, torch.zeros(45, 300), tokens_R=tokens)
    for number in range(3):
        rows = slice(bounds[number], bounds[number + 1])
        assert close(out[rows], products.product(x[tokens[rows]], weight[number]))
