"""Decode's operations on torch's CPU device, which are also what the kernels are compared with."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from decode_gpu.random_fp8 import random_fp8  # noqa: E402

from moechat.decode.gpu import ops  # noqa: E402
from moechat.decode.gpu.mailbox import ABORTED, GAVE_UP  # noqa: E402
from moechat.models.spec import LatentAttention, MoeSpec  # noqa: E402

MOE = MoeSpec(
    num_experts=24, num_experts_per_token=5, intermediate_size=1, scoring="sigmoid",
    num_groups=4, num_groups_kept=2, normalise_weights=True, routed_scaling=2.5,
)  # fmt: skip


class Spec:
    num_heads = 3
    softmax_scale = 0.2
    attention_softcap = 0.0


@pytest.fixture
def random():
    return torch.Generator().manual_seed(5)


def test_a_normed_product_is_the_product_of_the_norm(random) -> None:
    weight = random_fp8(20, 96, (128, 128), random)
    x, norm = torch.randn(3, 96, generator=random), torch.rand(96, generator=random)
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out = torch.ones(3, 20)
    got = ops.linear(x, weight, norm=ops.Norm(norm, 1e-6), add=out, out=out, exact=True)
    assert got is out
    want = (x * scale * norm) @ weight.to_dense(torch.float32).T + 1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_each_other(random) -> None:
    weight = random_fp8(20, 96, (128, 128), random)
    x = torch.randn(5, 96, generator=random)
    together = ops.linear(x, weight)
    assert torch.equal(together[2:3], ops.linear(x[2:3], weight))


def test_absorbed_attention_is_attention_of_expanded_keys(random) -> None:
    sizes = LatentAttention(
        q_lora_rank=0, kv_lora_rank=16, nope_dim=8, rope_dim=4, v_dim=6, norm_eps=1e-6
    )
    cache = torch.randn(2, 12, 20, generator=random)
    at = ops.Slots(
        cache, *(torch.tensor([n], dtype=torch.int32) for n in (1, 2, 9))
    )  # sees slots 2 to 8 and its own
    query, kv = torch.randn(1, 36, generator=random), torch.randn(1, 20, generator=random)
    weight = torch.randn(3 * 14, 16, generator=random)
    none = torch.ones(1, 2), torch.zeros(1, 2)
    values, slots = ops.latent_attention(
        Spec(), sizes, query, kv, torch.ones(16), *none, False, weight, at
    )
    assert torch.equal(cache[1, 9], slots[0])
    seen = cache[1, 2:10]
    for head in range(3):
        expanded = seen[:, :16] @ weight[head * 14 : head * 14 + 14].T
        keys = torch.cat([expanded[:, :8], seen[:, 16:]], 1)
        q = query[0, head * 12 : head * 12 + 12]
        want = torch.softmax(keys @ q * 0.2, 0) @ expanded[:, 8:]
        torch.testing.assert_close(values[0, head * 6 : head * 6 + 6], want, rtol=1e-4, atol=1e-4)


def a_mailbox(limit_seconds: float = 5.0) -> ops.Mailbox:
    box = ops.Mailbox.create(torch.device("cpu"), 4, 24, 5, limit_seconds=limit_seconds)
    box.num_rows.fill_(2)
    return box


def test_mailbox(random) -> None:
    box, x = a_mailbox(), torch.randn(3, 24, generator=random)
    ids, weights = ops.route_and_post(
        MOE, x, None, x, box, norm=ops.Norm(torch.full((24,), 2.0), 1e-6)
    )
    assert (int(box.request), int(box.rows)) == (1, 2)
    assert torch.equal(box.ids[:2], ids[:2])
    assert torch.equal(box.weights[:2], weights[:2])
    assert not box.x[2:].any()
    scale = x.square().mean(-1, keepdim=True).rsqrt()
    torch.testing.assert_close(box.x[:2], (x * scale * 2)[:2], rtol=1e-4, atol=1e-4)

    def answer() -> None:
        time.sleep(0.01)
        box.y.fill_(3.0)
        box.reply.fill_(1)

    server = threading.Thread(target=answer)
    server.start()
    out = ops.wait(box, x)
    server.join()
    assert torch.equal(out[:2], x[:2] + 3)
    assert torch.equal(out[2], x[2])


@pytest.mark.parametrize("aborts", [False, True])
def test_a_mailbox_without_a_server(aborts: bool) -> None:
    box, x = a_mailbox(5.0 if aborts else 0.02), torch.ones(2, 24)
    ids, weights = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5)
    ops.post(x, ids, weights, box)
    if aborts:
        box.abort.fill_(1)
    begin = time.monotonic()
    assert torch.equal(ops.wait(box, x), x)
    assert int(box.error) == (ABORTED if aborts else GAVE_UP)
    ops.post(x, ids, weights, box)
    ops.wait(box, x)
    assert int(box.request) == 1
    assert time.monotonic() - begin < 2
    box.reset()
    assert (int(box.request), int(box.error), int(box.abort)) == (0, 0, 0)
