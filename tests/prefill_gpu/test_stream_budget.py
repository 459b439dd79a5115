"""Memory that is given to streamed weights, and what they take of it."""

from __future__ import annotations

import pytest
from oracles import oracle_folder
from stored_models import bind

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.errors import DoesNotFit  # noqa: E402
from moechat.gpu_weights.stored import StoredWeights  # noqa: E402
from moechat.gpu_weights.weight import Fp8Matrix  # noqa: E402
from moechat.prefill.gpu.budget import MAX_SLOTS, fit_settings  # noqa: E402
from moechat.prefill.gpu.plan import StreamSettings  # noqa: E402
from moechat.prefill.gpu.streamed_source import StreamedSource  # noqa: E402


def taken(folder: str, settings: StreamSettings) -> int:
    """Bytes of memory that a pass with all matrices asked for leaves behind or had at most."""
    spec, tensors = bind(oracle_folder(folder))
    source = StreamedSource(spec, tensors, device="cpu", settings=settings)
    most = 0
    for layer in range(spec.num_layers):
        source.begin(layer)
        roles = [r for r in source._stored.roles if r.startswith(f"layers.{layer}.")]
        matrices = [source.matrix(role) for role in roles]
        tensors_of_layer = [m.codes if isinstance(m, Fp8Matrix) else m for m in matrices]
        for _ in source.expert_groups(layer) if layer in source._plan.groups else ():
            pass
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in tensors_of_layer if t is not None}  # fmt: skip
        slots = [slot.memory for slot in source._layer_slots.values()]
        rings = {id(item.ring): item.ring for item in source._plan.items}
        slots += [slot.memory for ring in rings.values() for slot in ring._free]
        storages |= {slot.data_ptr(): len(slot) for slot in slots}
        storages |= {t.data_ptr(): t.nbytes for t in source._decoded.values()}
        most = max(most, sum(storages.values()))
        source.release(layer)
    head = source.matrix("head")
    source.close()
    return most + (head.nbytes if head is not None else 0)


@pytest.mark.parametrize("folder", ["deepseek_v3_fp8_256", "olmoe", "gpt_oss_mxfp4", "qwen3"])
def test_weights_stay_within_what_they_are_given(folder: str) -> None:
    spec, tensors = bind(oracle_folder(folder))
    weights = StoredWeights.of(tensors)
    chosen = []
    for memory_bytes in (1_000_000, 1_500_000, 2_500_000, 5_000_000, 1 << 30):
        try:
            settings = fit_settings(
                weights, torch.bfloat16, memory_bytes, num_layers=spec.num_layers
            )
        except DoesNotFit:
            continue
        assert taken(folder, settings) <= memory_bytes
        chosen.append(settings)
    stay = [settings.resident_bytes for settings in chosen]
    least = [float("inf") if each is None else each for each in stay]
    assert len(chosen) > 1 and least == sorted(least)
    if weights.experts:
        assert chosen[-1].num_slots == MAX_SLOTS and stay[-1] is None


def test_too_little_memory_is_said_with_its_size() -> None:
    spec, tensors = bind(oracle_folder("olmoe"))
    weights = StoredWeights.of(tensors)
    with pytest.raises(DoesNotFit, match="cannot be streamed"):
        fit_settings(weights, torch.bfloat16, 10_000, num_layers=spec.num_layers)
