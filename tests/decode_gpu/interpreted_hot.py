"""Run by test_hot_experts.py: the kernels of held experts against plain torch."""

from __future__ import annotations

import torch
import triton_interpreter  # noqa: F401  # before any kernel
from oracles import ORACLES

from moechat.decode.gpu import triton_hot
from moechat.decode.gpu.hot_experts import HotExperts, HotLayer
from moechat.gpu_weights.weight import Fp8Matrix
from moechat.models.architectures import load_spec

CASES = [("fp8", "bf16"), ("bf16", "bf16"), ("f32", "bf16"), ("fp8", "exact"), ("f32", "exact")]
ROWS, CHOSEN, HELD, EXPERTS, WIDTH, HIDDEN = 2, 3, 3, 6, 72, 200


def weight(outputs: int, inputs: int, kind: str):
    if kind == "fp8":
        codes = torch.randint(0, 256, (HELD, outputs, inputs), dtype=torch.uint8)
        codes[(codes & 0x7F) > 0x58] = 0x31
        grid = torch.rand(HELD, -(-outputs // 128), -(-inputs // 128)) / 16
        return Fp8Matrix(codes, grid, (128, 128))
    values = torch.randn(HELD, outputs, inputs) / inputs**0.5
    return values if kind == "f32" else values.bfloat16()


def main() -> None:
    torch.manual_seed(1)
    for name in ("deepseek_v3_bf16", "gpt_oss_bf16"):
        spec = load_spec(ORACLES / name)
        for kind, compute in CASES:
            place_E = torch.tensor([2, -1, 0, -1, 1, -1], dtype=torch.int32)
            held = HotLayer(
                place_E,
                weight(WIDTH, HIDDEN, kind),
                weight(WIDTH, HIDDEN, kind),
                weight(HIDDEN, WIDTH, kind),
            )
            hot = object.__new__(HotExperts)
            hot._spec, hot._compute = spec, compute
            rounds = hot._rounds(held)
            assert rounds == (compute == "bf16" and kind != "f32")
            x, base = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
            ids = torch.tensor([[4, 1, 0], [3, 5, 2]], dtype=torch.int32)
            weights = torch.rand(ROWS, CHOSEN)
            want = hot._plain(held, x, ids, weights, base)
            got = triton_hot.add(spec, held, x, ids, weights, base, rounds)
            alone = triton_hot.add(spec, held, x[:1], ids[:1], weights[:1], base[:1], rounds)
            assert torch.equal(alone[0], got[0])
            error = (got - want).abs().max() / (want - base).abs().max()
            # A sum that is rounded the other way between the products moves by a step of BF16.
            assert error < (4e-3 if rounds else 1e-5), (name, kind, compute, float(error))
            print("ok", name, kind, compute, float(error))


main()
