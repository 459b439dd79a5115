"""The oracle folders by stream-loading prefill on a device, by hand: tests/measure_oracles.py cuda.

For every folder: exact mode against transformers, default mode within the bound of its own error,
choices against the CPU's prefill wherever its margin is clear, and all bits over ring and chunk
sizes. Needs torch, the native module, and the repository.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from oracles import ORACLE_NAMES, expected, meta, oracle_folder

from moechat import _native
from moechat.engine.loading import load_model
from moechat.errors import MoechatError
from moechat.kv.cache import KVCache
from moechat.prefill.cpu import CpuPrefill
from moechat.prefill.gpu.plan import StreamSettings
from moechat.prefill.gpu.stream_prefill import StreamPrefill
from moechat.prefill.gpu.streamed_source import StreamedSource

MARGIN = 0.25
NEVER = _native.CancelFlag()


def logits_of(span: CpuPrefill | StreamPrefill, layers: int) -> tuple[np.ndarray, list[np.ndarray]]:
    ids = [np.sort(span.run_layer(NEVER).router_ids_TK, 1) for _ in range(layers)]
    return span.logits(NEVER, 0), ids


@dataclass
class Case:
    """One folder in one mode, streamed to one device."""

    name: str
    compute: str
    device: str

    def __post_init__(self) -> None:
        self.model = load_model(oracle_folder(self.name), self.compute)
        self.want = expected(oracle_folder(self.name))

    def streamed(
        self, ids: list[int], *, group_bytes: int = 1 << 30, num_slots: int = 2, chunk: int = 8192
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        spec = self.model.spec
        source = StreamedSource(
            spec,
            self.model.files.bind(),
            device=self.device,
            compute=self.compute,
            settings=StreamSettings(group_bytes=group_bytes, num_slots=num_slots),
        )
        cache = KVCache(0, spec, self.compute)
        span = StreamPrefill(spec, source, cache, ids, chunk_tokens=chunk)
        result = logits_of(span, spec.num_layers)
        source.close()
        return result

    def error(self) -> str:
        logits, _ = self.streamed(self.want["prompt_1_ids"].tolist())
        error = logits - self.want["all_logits"]
        if self.compute == "exact":
            largest = float(np.abs(error).max())
            return f"exact {largest:.1e}{'' if largest <= 1e-3 else ' WRONG'}"
        facts = meta(oracle_folder(self.name))
        bound = 2 * facts["bf16_compute"]["hidden_rel_rms"] * facts["logits_std"]
        rms = float(np.sqrt(np.mean(error**2)))
        return f"rms {rms:.4f} of {bound:.4f}{'' if rms <= bound else ' WRONG'}"

    def choices(self) -> str:
        """Teacher-forced, where the CPU's margin is clear; tokens routed otherwise are apart."""
        spec, same, differ, rerouted = self.model.spec, 0, 0, 0
        for number in range(3):
            ids = self.want[f"prompt_{number}_ids"].tolist()
            ids += self.want[f"prompt_{number}_greedy"].tolist()[:-1]
            cache = KVCache(0, spec, self.compute)
            cpu = CpuPrefill(self.model.native, _native.ThreadPool(2), cache, ids)
            theirs, their_ids = logits_of(cpu, spec.num_layers)
            ours, our_ids = self.streamed(ids)
            other = np.any([(a != b).any(1) for a, b in zip(their_ids, our_ids)], axis=0)
            top = np.sort(theirs, axis=1)[:, -2:]
            clear = top[:, 1] - top[:, 0] >= MARGIN
            wrong = clear & (theirs.argmax(1) != ours.argmax(1))
            same += int((clear & ~wrong).sum())
            differ += int((wrong & ~other).sum())
            rerouted += int((wrong & other).sum())
        return f"argmax {same} equal, {differ} differ, {rerouted} rerouted"

    def bits(self) -> str:
        """Over ring, group and chunk sizes."""
        ids = (self.want["prompt_1_ids"].tolist() * 40)[:1500]
        base, _ = self.streamed(ids)
        settings: list[dict[str, int]] = [
            {"group_bytes": 1},
            {"group_bytes": 1, "num_slots": 4, "chunk": 64},
            {"chunk": 300},
        ]
        for changed in settings:
            other, _ = self.streamed(ids, **changed)
            if not np.array_equal(base.view(np.int32), other.view(np.int32)):
                return f"BITS DIFFER with {changed}: {np.abs(base - other).max():.2e}"
        return "bits equal"


def check(name: str, device: str) -> str:
    exact, half = (Case(name, compute, device) for compute in ("exact", "bf16"))
    return "; ".join([exact.error(), exact.bits(), half.error(), half.choices(), half.bits()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cuda", help="torch's name of it")
    parser.add_argument("names", nargs="?", help="folders, with commas; all if left out")
    chosen = parser.parse_args()
    device = chosen.device
    torch.set_num_threads(1)
    for name in chosen.names.split(",") if chosen.names else ORACLE_NAMES:
        try:
            print(f"{name}: {check(name, device)}", flush=True)
        except MoechatError as error:
            print(f"{name}: {error.message}", flush=True)
        except Exception as error:
            print(f"{name}: FAILED {type(error).__name__}: {error}"[:1000], flush=True)


if __name__ == "__main__":
    main()
