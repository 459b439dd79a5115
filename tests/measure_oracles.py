"""The oracle folders by stream-loading prefill on a device, by hand: tests/measure_oracles.py cuda.

For every folder: exact mode against transformers, default mode within the bound of its own error,
choices against the CPU's prefill wherever its margin is clear, and all bits over ring and chunk
sizes. Needs torch, the native module, and the repository.
"""

from __future__ import annotations

import sys

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


def check(name: str, device: str) -> str:
    folder, want = oracle_folder(name), expected(oracle_folder(name))
    facts = meta(folder)
    results = []
    for compute in ("exact", "bf16"):
        model = load_model(folder, compute)
        tensors = list(model.files.bind())

        def streamed(
            ids: list[int], *, group_bytes: int = 1 << 30, num_slots: int = 2, chunk: int = 8192
        ):
            source = StreamedSource(
                model.spec,
                tensors,
                device=device,
                compute=compute,
                settings=StreamSettings(group_bytes=group_bytes, num_slots=num_slots),
            )
            cache = KVCache(0, model.spec, compute)
            span = StreamPrefill(model.spec, source, cache, ids, chunk_tokens=chunk)
            result = logits_of(span, model.spec.num_layers)
            source.close()
            return result

        prompt = want["prompt_1_ids"].tolist()
        logits, _ = streamed(prompt)
        error = logits - want["all_logits"]
        if compute == "exact":
            results.append(
                f"exact {np.abs(error).max():.1e}{'' if np.abs(error).max() <= 1e-3 else ' WRONG'}"
            )
        else:
            rms, bound = (
                float(np.sqrt(np.mean(error**2))),
                2 * facts["bf16_compute"]["hidden_rel_rms"] * facts["logits_std"],
            )
            results.append(f"rms {rms:.4f} of {bound:.4f}{'' if rms <= bound else ' WRONG'}")
            same = differ = excused = 0
            for number in range(3):
                ids = (
                    want[f"prompt_{number}_ids"].tolist()
                    + want[f"prompt_{number}_greedy"].tolist()[:-1]
                )
                cpu = CpuPrefill(
                    model.native, _native.ThreadPool(2), KVCache(0, model.spec, compute), ids
                )
                theirs, their_ids = logits_of(cpu, model.spec.num_layers)
                ours, our_ids = streamed(ids)
                rerouted = np.any([(a != b).any(1) for a, b in zip(their_ids, our_ids)], axis=0)
                top = np.sort(theirs, axis=1)[:, -2:]
                clear = top[:, 1] - top[:, 0] >= MARGIN
                wrong = clear & (theirs.argmax(1) != ours.argmax(1))
                same += int((clear & ~wrong).sum())
                differ += int((wrong & ~rerouted).sum())
                excused += int((wrong & rerouted).sum())
            results.append(
                f"argmax {same} equal, {differ} differ, {excused} rerouted{' WRONG' if differ or excused > 1 else ''}"
            )
        long = (prompt * 40)[:1500]
        base, _ = streamed(long)
        for settings in (
            {"group_bytes": 1},
            {"group_bytes": 1, "num_slots": 4, "chunk": 64},
            {"chunk": 300},
        ):
            other, _ = streamed(long, **settings)
            if not np.array_equal(base.view(np.int32), other.view(np.int32)):
                results.append(
                    f"{compute} BITS DIFFER with {settings}: {np.abs(base - other).max():.2e}"
                )
    return "; ".join(results)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    torch.set_num_threads(1)
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else ORACLE_NAMES
    for name in names:
        try:
            print(f"{name}: {check(name, device)}", flush=True)
        except MoechatError as error:
            print(f"{name}: {error.message}", flush=True)
        except Exception as error:
            print(f"{name}: FAILED {type(error).__name__}: {error}"[:1000], flush=True)


if __name__ == "__main__":
    main()
