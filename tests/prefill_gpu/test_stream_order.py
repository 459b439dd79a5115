"""What has to wait for what on a GPU, with numbers for marks: mistakes there would be silent."""

from __future__ import annotations

import itertools
import threading

import pytest
from oracles import oracle_folder
from stored_models import bind

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.gpu_weights.weight import Fp8Matrix, Weight  # noqa: E402
from moechat.prefill.gpu.parcel import Parcel, Slot  # noqa: E402
from moechat.prefill.gpu.plan import StreamSettings  # noqa: E402
from moechat.prefill.gpu.streamed_source import StreamedSource  # noqa: E402
from moechat.prefill.gpu.transfer import CpuTransfer  # noqa: E402


class Numbers(CpuTransfer):
    """Marks count up; remembers what each side has waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count(1)
        self.copies_waited: list[int] = []
        self.compute_waited: list[int] = []
        self.host_waited: list[int] = []

    def copy_mark(self) -> int:
        return next(self._count)

    compute_mark = copy_mark

    def copies_wait(self, mark: int) -> None:
        self.copies_waited.append(mark)

    def compute_waits(self, mark: int) -> None:
        self.compute_waited.append(mark)

    def host_waits(self, mark: int) -> None:
        self.host_waited.append(mark)


# Experts that are views of their slot, and experts that are decoded.
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3_fp8_256", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("resident_bytes", [0, None])
def test_slots_are_filled_after_their_last_use_and_used_after_they_are_filled(
    name: str, resident_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Numbers()
    monkeypatch.setattr(StreamedSource, "_make_transfer", lambda self, settings: transfer)
    # By address of a slot's memory: its last use, its fills, and the one that was taken.
    used: dict[int, int] = {}
    filled: dict[int, int] = {}
    taken_fill: dict[int, int] = {}
    fills, lock, fill = 0, threading.Lock(), Parcel.fill

    def checked_fill(parcel: Parcel, slot: Slot, to: Numbers) -> None:
        nonlocal fills
        with lock:
            fills += 1
            filled[slot.memory.data_ptr()] = fills
            assert to.copies_waited[-1] == slot.free
            assert slot.free > used.get(slot.memory.data_ptr(), 0)
            # What the host writes has been copied before.
            assert slot.ready is None or slot.ready in to.host_waited
        fill(parcel, slot, to)

    monkeypatch.setattr(Parcel, "fill", checked_fill)
    spec, tensors = bind(oracle_folder(name))
    source = StreamedSource(
        spec, tensors, device="cpu",
        settings=StreamSettings(group_bytes=100_000, num_slots=2, resident_bytes=resident_bytes),
    )  # fmt: skip
    taken = source._take

    def use(weight: Weight) -> None:
        tensor = weight.codes if isinstance(weight, Fp8Matrix) else weight
        address = tensor.untyped_storage().data_ptr()
        with lock:
            assert filled.get(address) == taken_fill.get(address)
            used[address] = transfer.compute_mark()

    def checked_take(item: object) -> Slot:
        slot = taken(item)
        assert slot.ready in transfer.compute_waited
        taken_fill[slot.memory.data_ptr()] = filled[slot.memory.data_ptr()]
        use(slot.memory)  # decoding
        return slot

    monkeypatch.setattr(source, "_take", checked_take)
    for _ in range(2):
        for layer in range(spec.num_layers):
            source.begin(layer)
            source.matrix(f"layers.{layer}.o")
            for group in source.expert_groups(layer) if layer in source._plan.groups else ():
                use(group.gate)
            if layer in source._layer_slots:
                use(source._layer_slots[layer].memory)
            source.release(layer)
    num_groups = sum(len(groups) for groups in source._plan.groups.values())
    source.close()
    assert fills >= 2 * num_groups
