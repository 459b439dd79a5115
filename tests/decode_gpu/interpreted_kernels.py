"""Decode's kernels in Triton's interpreter; test_kernels.py runs it in a process of its own."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton_interpreter  # noqa: F401  # before any kernel
from random_fp8 import random_fp8

from moechat.decode.gpu import ops, plain_ops, triton_latent, triton_linear, triton_mailbox
from moechat.decode.gpu.mailbox import ABORTED, GAVE_UP, Mailbox
from moechat.decode.gpu.weight_views import Norm, Slots
from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import GroupedAttention, LatentAttention, MoeSpec


class Spec:
    num_heads = 6
    softmax_scale = 0.1
    attention_softcap = 0.0
    rms_norm_eps = 1e-6
    activation = "silu"
    activation_limit = 1.0
    activation_alpha = 1.7


def random_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.shape == want.shape
    assert float((got - want).norm() / want.norm()) < limit


def linear(x: torch.Tensor, weight: Weight, outputs: int, **how) -> torch.Tensor:
    counters = torch.zeros(64, dtype=torch.int32)
    out = torch.full((len(x), outputs), torch.nan)
    triton_linear.linear(x, weight, counters, out, **how)
    assert not counters.any()  # ready for the next product
    if isinstance(weight, Fp8Matrix):  # the inputs keep 11 bits
        near(out, plain_ops.linear(x, weight, **{**how, "exact": True}), 4e-4)
    else:
        near(out, plain_ops.linear(x, weight, **how), 1e-6)
    return out


def test_fp8_in_parts_with_norm_and_residual() -> None:
    random = random_generator()
    weight = random_fp8(48, 1500, (128, 128), random)
    wide = torch.randn(3, 1600, generator=random)
    x = wide[:, :1500]
    norm = Norm(torch.rand(1500, generator=random), 1e-6)
    add = torch.randn(3, 48, generator=random)
    together = linear(x, weight, 48, norm=norm, add=add)
    alone = linear(x[1:2], weight, 48, norm=norm, add=add[1:2])
    assert torch.equal(together[1:2], alone)
    for size in (1e-20, 1e20):  # of inputs, whose power of two float16 does not have
        linear(x * size, weight, 48)


def test_fp8_codes_are_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN, which the interpreter decodes as a number
    weight = Fp8Matrix(codes, torch.full((2, 1), 0.5), (128, 128))
    x = torch.zeros(1, 16)
    x[0, 3] = 1.0
    out = torch.empty(1, 256)
    triton_linear.linear(x, weight, torch.zeros(64, dtype=torch.int32), out)
    want = codes[:, 0].view(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(out[0], want)


def test_rows_of_a_matrix_begin_within_a_block_of_scales() -> None:
    random = random_generator()
    weight = random_fp8(200, 200, (128, 64), random).rows(slice(70, 150))
    linear(torch.randn(2, 200, generator=random), weight, 80, bias=torch.ones(80))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_gated_inputs(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = random_generator()
    monkeypatch.setattr(Spec, "activation", activation)
    weight = random_fp8(16, 96, (128, 128), random)
    linear(torch.randn(2, 192, generator=random), weight, 16, gated=Spec(), exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_weights(dtype: torch.dtype) -> None:
    random = random_generator()
    weight = torch.randn(40, 300, generator=random).to(dtype)
    x = torch.randn(2, 300, generator=random)
    linear(x, weight, 40)
    linear(x, weight, 40, exact=True)


@pytest.mark.parametrize(
    ("dtype", "interleaved", "limit"),
    [(torch.bfloat16, True, 4e-3), (torch.bfloat16, False, 4e-3), (torch.float32, True, 1e-6)],
)
def test_latent_attention(
    dtype: torch.dtype, interleaved: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = random_generator()
    sizes = LatentAttention(
        q_lora_rank=0, kv_lora_rank=96, nope_dim=48, rope_dim=16, v_dim=32, norm_eps=1e-6
    )
    if not interleaved:
        monkeypatch.setattr(Spec, "attention_softcap", 3.0)
    weight: Weight = random_fp8(30 + 6 * 80, 96, (128, 64), random).rows(slice(30, 510))
    if dtype == torch.float32:
        assert isinstance(weight, Fp8Matrix)
        weight = weight.to_dense(torch.float32)
    slots = 1100  # more tiles than parts
    cache = torch.randn(4, slots + 8, 112, generator=random).to(dtype)
    slab, begin = torch.tensor([2, 0, 3]), torch.tensor([0, 5, 0])
    own = torch.tensor([slots, 20, 0])
    at = Slots(cache, *(numbers.to(torch.int32) for numbers in (slab, begin, own)))
    query = torch.randn(3, 6 * 64, generator=random)
    kv = torch.randn(3, 120, generator=random)[:, :112]
    angle = torch.rand(3, 8, generator=random) * 6
    arguments = (torch.rand(96, generator=random), angle.cos(), angle.sin(), interleaved, weight)
    got, new = triton_latent.latent_attention(Spec(), sizes, query, kv, *arguments, at)
    written = cache.clone()
    want, want_new = plain_ops.latent_attention(Spec(), sizes, query, kv, *arguments, at)
    near(got, want, limit)
    assert torch.equal(cache, written)
    assert torch.equal(new, want_new)


@pytest.mark.parametrize(
    ("dtype", "sinks", "limit"), [(torch.bfloat16, True, 8e-3), (torch.float32, False, 1e-6)]
)
def test_grouped_attention(
    dtype: torch.dtype, sinks: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = random_generator()
    monkeypatch.setattr(ops, "has_kernels", lambda device_type: True)
    sizes = GroupedAttention(num_kv_heads=2, head_dim=24, clip=1.5)
    if not sinks:
        monkeypatch.setattr(Spec, "attention_softcap", 3.0)
    slots = 1100
    cache = torch.randn(4, slots + 8, 96, generator=random).to(dtype)
    slab, begin = torch.tensor([2, 0, 3]), torch.tensor([0, 5, 0])
    own = torch.tensor([slots, 20, 0])
    at = Slots(cache, *(numbers.to(torch.int32) for numbers in (slab, begin, own)))
    q, k, v = (torch.randn(3, size, generator=random) for size in (144, 48, 48))
    angle = torch.rand(3, 8, generator=random) * 6
    arguments = (
        Spec(), sizes, q, k, v, torch.rand(24, generator=random), None,
        torch.randn(6, generator=random) if sinks else None, angle.cos(), angle.sin(), False, at,
    )  # fmt: skip
    got, new = ops.grouped_attention(*arguments)
    written = cache.clone()
    want, want_new = plain_ops.grouped_attention(*arguments)
    near(got, want, limit)
    assert torch.equal(cache, written)
    assert torch.equal(new, want_new)


MOES = {
    "groups": MoeSpec(
        num_experts=24, num_experts_per_token=5, intermediate_size=1, scoring="sigmoid",
        num_groups=4, num_groups_kept=2, normalise_weights=True, routed_scaling=2.5,
    ),
    "softmax": MoeSpec(num_experts=60, num_experts_per_token=3, intermediate_size=1),
    "best of groups": MoeSpec(
        num_experts=16, num_experts_per_token=2, intermediate_size=1, num_groups=4,
        num_groups_kept=1,
    ),
    "chosen": MoeSpec(
        num_experts=12, num_experts_per_token=4, intermediate_size=1, scoring="softmax_chosen"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOES)
def test_route(name: str) -> None:
    random, moe = random_generator(), MOES[name]
    logits = torch.randn(4, moe.num_experts, generator=random)
    logits[1] = 0.5
    logits[2] = (logits[2] * 2).round() / 2  # ties
    logits[3, 3] = torch.nan
    correction = (torch.randn(moe.num_experts, generator=random)).round() / 8
    if moe.scoring != "sigmoid":
        correction = None
    ids, weights = torch.empty(4, moe.num_experts_per_token, dtype=torch.int32), torch.empty(4, 0)
    weights = torch.empty(ids.shape)
    triton_mailbox.route_and_post(moe, logits, correction, ids, weights, None, None, None)
    want_ids, want_weights = plain_ops.route(moe, logits, correction)
    rows = 3 if moe.scoring == "softmax" else 4  # all of a row is NaN after a softmax
    assert torch.equal(ids[:rows], want_ids[:rows])
    torch.testing.assert_close(
        weights[:rows], want_weights[:rows], rtol=1e-5, atol=1e-6, equal_nan=True
    )
    assert all(len(set(row.tolist())) == len(row) for row in ids)


def a_mailbox() -> Mailbox:
    box = Mailbox.create(torch.device("cpu"), 4, 300, 5, limit_seconds=0.01)
    box.num_rows.fill_(2)
    return box


def posted(box: Mailbox, x: torch.Tensor, norm: Norm | None = None) -> None:
    moe = MOES["groups"]
    logits = torch.randn(len(x), moe.num_experts, generator=random_generator())
    ids = torch.empty(len(x), 5, dtype=torch.int32)
    weights = torch.empty(len(x), 5)
    triton_mailbox.route_and_post(moe, logits, None, ids, weights, x, box, norm)
    if not box.error:
        assert torch.equal(box.ids[:2], ids[:2])
        assert torch.equal(box.weights[:2], weights[:2])


def test_post_and_wait() -> None:
    random, box = random_generator(), a_mailbox()
    x = torch.randn(3, 300, generator=random)
    norm = Norm(torch.rand(300, generator=random), 1e-6)
    for number in (1, 2):
        posted(box, x, norm)
        assert (int(box.request), int(box.sequence), int(box.rows)) == (number, number, 2)
        near(box.x[:2], plain_ops.rms_norm(x, *norm)[:2], 1e-6)
        assert not box.x[2:].any()
        assert not box.arrived.any()

        def answer(number: int = number) -> None:
            time.sleep(0.02)
            box.y[:2] = number
            box.reply.fill_(number)

        box.limit.fill_(2**62)
        thread = threading.Thread(target=answer)
        thread.start()
        out = torch.empty_like(x)
        triton_mailbox.wait(box, x, out)
        thread.join()
        assert not box.error
        assert torch.equal(out[:2], x[:2] + number)
        assert torch.equal(out[2], x[2])


@pytest.mark.parametrize("aborts", [False, True])
def test_giving_up(aborts: bool) -> None:
    box = a_mailbox()
    x = torch.ones(3, 300)
    posted(box, x)
    if aborts:
        box.limit.fill_(2**62)
        box.abort.fill_(1)
    out = torch.zeros_like(x)
    triton_mailbox.wait(box, x, out)
    assert int(box.error) == (ABORTED if aborts else GAVE_UP)
    assert torch.equal(out, x)
    posted(box, x)
    assert int(box.request) == 1  # nothing more is asked
    box.limit.fill_(2**62)
    triton_mailbox.wait(box, x, out)  # and nothing waited for


def test_numbers_wrap_around() -> None:
    box = a_mailbox()
    box.sequence.fill_(2**31 - 1)
    posted(box, torch.ones(2, 300))
    assert int(box.request) == -(2**31)
    box.reply.copy_(box.request)
    triton_mailbox.wait(box, torch.ones(2, 300), torch.empty(2, 300))
    assert not box.error


def test_operations_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on CUDA."""
    monkeypatch.setattr(ops, "has_kernels", lambda device_type: True)
    monkeypatch.setattr(ops, "plain_ops", None)
    monkeypatch.setattr(ops, "plain_mailbox", None)
    random, box = random_generator(), a_mailbox()
    x = torch.randn(2, 300, generator=random)
    out = torch.empty(2, 24)
    weight = random_fp8(24, 300, (128, 128), random)
    norm = Norm(torch.ones(300), 1e-6)
    assert ops.linear(x, weight, norm=norm, out=out) is out
    near(out, plain_ops.linear(x, weight, norm=norm, exact=True), 4e-4)
    ids, _ = ops.route_and_post(MOES["groups"], out, None, x, box, norm=norm)
    assert torch.equal(box.ids[:2], ids)
    ops.post(x, *ops.route(MOES["groups"], out, None), box)
    assert torch.equal(box.x[:2], x)
    box.y.fill_(1.0)
    box.reply.copy_(box.request)
    assert torch.equal(ops.wait(box, x), x + 1)
