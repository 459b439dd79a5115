"""Speed of the KV codec, run by hand: ``python tests/measure_kv_codec.py``.

GB/s of BF16 rows in (encode) or out (decode) on one thread, beside a plain copy of the same rows
between the same bursts. A span of 2,048 tokens; the kernels alone, then whole packets with their
checksum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from moechat import _native
from moechat.kv.layout import KVLayout, Part
from moechat.kv.packet import decode_packet, encode_packet, verify
from moechat.kv.tiers import Tier, coded_parts

TOKENS = 2048
LAYOUTS = {
    "8 heads of 128": KVLayout(
        tuple(Part(128 * i, 128, "key" if i < 8 else "value") for i in range(16))
    ),
    "2 heads of 64": KVLayout(
        tuple(Part(64 * i, 64, "key" if i < 2 else "value") for i in range(4))
    ),
    "latent 512 + 64": KVLayout((Part(0, 512, "latent"), Part(512, 64, "rotary"))),
}


def rates(actions: dict[str, Callable[[], object]], num_bytes: int) -> dict[str, float]:
    """Median GB/s of each action, all taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(12):
        for name, action in actions.items():
            repeats = max(1, int(20e6 / num_bytes))
            began = time.perf_counter()
            for _ in range(repeats):
                action()
            if round_ > 1:
                seconds[name].append((time.perf_counter() - began) / repeats)
    return {name: num_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}


def measure(layout: KVLayout, centre_keys: bool) -> dict[str, float]:
    """Rates of every tier that the layout has."""
    random = np.random.default_rng(1)
    values = random.standard_normal(TOKENS * layout.width, np.float32)
    rows = _native.to_bf16(values).reshape(TOKENS, layout.width)
    out = np.empty_like(rows)
    positions, chosen = np.arange(TOKENS, dtype=np.int32), np.arange(TOKENS)
    actions: dict[str, Callable[[], object]] = {"copy": lambda: np.copyto(out, rows)}
    for tier in Tier:
        tiers = np.full(TOKENS, tier, np.uint8)
        try:
            packet = encode_packet(0, 0, 0, positions, rows, tiers, layout, centre_keys=centre_keys)
        except ValueError:
            continue
        if tier != Tier.NATIVE:
            parts, centre = coded_parts(layout, tier), packet.centre
            scales = packet.scales.get(tier, np.empty((TOKENS, 0), np.float16))
            actions[f"{tier.name} encode"] = lambda p=parts, c=centre: _native.kv_encode(
                rows, chosen, p, c
            )
            actions[f"{tier.name} decode"] = (
                lambda b=packet.payload[tier], s=scales, p=parts, c=centre: _native.kv_decode(
                    b, s, p, c, out, chosen
                )
            )
        actions[f"{tier.name} packet encode"] = lambda t=tiers: encode_packet(
            0, 0, 0, positions, rows, t, layout, centre_keys=centre_keys
        )
        actions[f"{tier.name} packet decode"] = lambda p=packet: decode_packet(p, layout, "bf16")
        actions[f"{tier.name} packet verify"] = lambda p=packet: verify(p)
    return rates(actions, rows.nbytes)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for isa in _native.supported_instruction_sets():
        if isa in ("amx", "avx512bf16"):
            continue  # the codec of avx512
        _native.force_instruction_set(isa)
        for name, layout in LAYOUTS.items():
            for centre_keys in (False, True) if name == "8 heads of 128" else (True,):
                print(f"{isa}, {name}, {'centred' if centre_keys else 'plain'}: GB/s of BF16")
                for action, rate in measure(layout, centre_keys).items():
                    print(f"  {action:24} {rate:7.2f}")


if __name__ == "__main__":
    main()
