"""The weights of a model on a device, layer by layer, straight from the mapped files.

Routed experts come in groups through a ring of slots. The other matrices of a layer stay on the
device as they are stored, as far as ``resident_bytes`` go, and else come before the layer's
experts. Both are decoded when they are asked for, but FP8 where inputs are BF16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.errors import BadParameter
from moechat.gpu_weights.decode import decode, is_view, stays_stored, weight_of
from moechat.gpu_weights.inputs import can_quantise
from moechat.gpu_weights.products import tiles
from moechat.gpu_weights.stored import Layout, StoredMatrix, StoredWeights
from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import BoundTensor, ModelSpec
from moechat.prefill.gpu import register
from moechat.prefill.gpu.parcel import Parcel, Slot
from moechat.prefill.gpu.plan import Group, StreamPlan, StreamSettings, ring_for
from moechat.prefill.gpu.register import Registrar
from moechat.prefill.gpu.ring import Feeder, Item, Ring
from moechat.prefill.gpu.source import ExpertGroup
from moechat.prefill.gpu.transfer import CpuTransfer, CudaPageLock, CudaTransfer, Transfer

# The CPU computes these in float32 in both modes, too.
_FLOAT32_ROLES = ("router", "shared_gate")
_GATHER_BYTES = 16 << 20  # of an embedding's rows at a time
_DTYPES = {"bf16": torch.bfloat16, "w8a8": torch.bfloat16, "exact": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """Since the source was made. ``stall_seconds``: computing waited for weights.

    ``copy_seconds`` are of the copies alone, so that bytes by seconds is the stream's rate.
    ``staged_bytes`` of ``copied_bytes`` went by way of buffers.
    """

    copied_bytes: int
    copy_seconds: float
    stall_seconds: float
    staged_bytes: int
    page_locked_bytes: int


class StreamedSource:
    """A LayerSource on any torch device. One forward pass at a time, of one thread."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[BoundTensor],
        *,
        device: torch.device | str,
        compute: str = "bf16",
        settings: StreamSettings | None = None,
        experts: slice | None = None,
    ) -> None:
        """``compute``: "bf16", "exact", or "w8a8": inputs of FP8 matrices are quantised, too.

        ``experts``: which of every layer come, consecutive ones; None for all.

        BadParameter for formats that cannot be streamed yet, and for "w8a8" on older GPUs.
        """
        settings = settings or StreamSettings()
        self.device, self.dtype = torch.device(device), _DTYPES[compute]
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._quantised_inputs = compute == "w8a8"
        if self._quantised_inputs and not _multiplies_codes(self.device):
            raise BadParameter(
                "compute cannot be 'w8a8'",
                "this GPU does not multiply FP8 codes (Ada and Hopper are the first that do)",
                "Leave it out",
            )
        self._stored = StoredWeights.of(tensors)
        self._first_expert = 0
        if experts is not None:
            self._first_expert = experts.start
            self._stored.keep_experts(experts)
        self._registrar: Registrar | None = None
        self._transfer = self._make_transfer(settings)
        self._plan = StreamPlan(
            self._stored, spec.num_layers, self._transfer, self.device, settings
        )
        self._feeder = Feeder(self._transfer, self._plan.items)
        self._vectors: dict[str, torch.Tensor] = {}
        self._biases: dict[int, dict[str, torch.Tensor]] = {}
        self._matrices: dict[int | None, dict[str, Weight]] = {}
        self._layer_slots: dict[int, Slot] = {}
        self._group_slot: tuple[Ring, Slot] | None = None
        self._decoded: dict[str, torch.Tensor] = {}
        self._stalls: list[tuple[object, object]] = []
        self._stall_seconds = 0.0

    def vector(self, role: str) -> torch.Tensor | None:
        """As in LayerSource."""
        if role not in self._stored.vectors:
            return None
        if role not in self._vectors:
            self._vectors[role] = self._upload(self._stored.vectors[role])
        return self._vectors[role]

    def matrix(self, role: str) -> Weight | None:
        """As in LayerSource; routers and the shared expert's gate are float32.

        So is an embedding that BF16 does not hold.
        """
        half = self._stored.roles.get(role)
        if half is None:
            return None
        layer = _layer_of(half.key)
        known = self._matrices.setdefault(layer, {})
        if role not in known:
            dtype = self._dtype_of(role, self._stored.matrices[half.key].layout.format)
            if layer is None:
                parcel = Parcel({half.key: [self._stored.matrices[half.key]]})
                slot = self._copied_now(parcel)
            else:
                parcel, slot = self._plan.linears[layer].parcel, self._layer_slot(layer)
            for key, layout, data, scale in parcel.parts(slot):
                if key == half.key:
                    with torch.inference_mode():
                        if half.first is None:
                            known[role] = self._weight_of(layout, data, scale, dtype)[0]
                        else:
                            known[role] = decode(layout, data, scale, dtype)[0][half.first :: 2]
        return known[role]

    def rows(self, role: str, numbers: NDArray[np.int64]) -> torch.Tensor | None:
        """Rows of a matrix, float32 [n, inputs], without the rest of it: of an embedding.

        As stored, so that float32 is exact; they are widened on the device. IndexError for numbers
        that are no rows.
        """
        half = self._stored.roles.get(role)
        if half is None:
            return None
        stored = self._stored.matrices[half.key]
        if stored.scale is not None or stored.layout.transposed or half.first is not None:
            matrix = self.matrix(role)
            assert isinstance(matrix, torch.Tensor)
            return matrix[torch.from_numpy(numbers).to(self.device)].float()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < stored.layout.rows:
            raise IndexError(f"{role} has {stored.layout.rows} rows")
        return self._gathered(stored, numbers)

    def _gathered(self, stored: StoredMatrix, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Some rows by way of two page-locked buffers: one is copied while the other is filled."""
        table = stored.data.reshape(stored.layout.rows, -1)
        each = table.shape[1]
        shape = len(numbers), stored.layout.cols
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        size = max(1, min(len(numbers), _GATHER_BYTES // each))
        buffers = [self._transfer.host_buffer(size * each) for _ in range(2)]
        copied: list[Any] = [None, None]
        for number, rows in enumerate(tiles(len(numbers), size)):
            turn, count = number % 2, rows.stop - rows.start
            if copied[turn] is not None:
                self._transfer.host_waits(copied[turn])
            here = buffers[turn][: count * each].view(count, each)
            np.take(table, numbers[rows], 0, here.numpy(), "clip")  # "raise" makes a copy
            there = here.to(self.device, non_blocking=True).view(1, -1)
            layout = dataclasses.replace(stored.layout, rows=count)
            out[rows] = decode(layout, there, None, torch.float32)[0]
            copied[turn] = self._transfer.compute_mark()
        return out

    def expert_groups(self, layer: int) -> Iterator[ExpertGroup]:
        """As in LayerSource."""
        for group in self._plan.groups.get(layer, ()):
            self._end_group()
            slot = self._take(group.item)
            self._group_slot = (group.item.ring, slot)
            # The memory that it decodes to is used in and out of the caller's inference mode.
            with torch.inference_mode():
                found = self._expert_group(layer, group, slot)
            yield found
        self._end_group()

    def begin(self, layer: int) -> None:
        """As in LayerSource."""
        self._release_others(layer)
        self._feeder.prepare(layer)
        if self._registrar is not None:  # slower than the copies: it needs a start
            sources = (source for item in self._plan.items for source in item.parcel.sources)
            self._registrar.lock_ahead(sources, self._transfer.enter_thread)

    def release(self, layer: int) -> None:
        """As in LayerSource."""
        self._end_group()
        self._matrices.pop(layer, None)
        if layer in self._layer_slots and not self._plan.linears[layer].once:
            self._feeder.give_back(self._plan.linears[layer].ring, self._layer_slots.pop(layer))

    @property
    def expert_bytes(self) -> int:
        """Of the routed experts, which come once a pass."""
        groups = (group for layer in self._plan.groups.values() for group in layer)
        return sum(group.item.parcel.stored_bytes for group in groups)

    def statistics(self) -> StreamStatistics:
        """Waits for the copies and the computing under way."""
        self._stall_seconds += sum(self._transfer.seconds(*stall) for stall in self._stalls)
        self._stalls = []
        return StreamStatistics(
            copied_bytes=self._feeder.copied_bytes,
            copy_seconds=self._feeder.copy_seconds(),
            stall_seconds=self._stall_seconds,
            staged_bytes=self._transfer.staged_bytes,
            page_locked_bytes=self._registrar.registered_bytes if self._registrar else 0,
        )

    def close(self) -> None:
        """Wait for copies and let go of the mappings and the device's memory. Idempotent."""
        self._feeder.close()
        self._transfer.close()
        self._feeder.clear()
        self._plan.clear()
        self._stored = StoredWeights()
        self._matrices, self._layer_slots, self._decoded = {}, {}, {}
        self._vectors, self._biases, self._group_slot = {}, {}, None

    def _make_transfer(self, settings: StreamSettings) -> Transfer:
        if self.device.type != "cuda":
            return CpuTransfer()
        limit = settings.page_lock_bytes
        self._registrar = Registrar(
            CudaPageLock(self.device),
            limit_bytes=register.default_limit_bytes() if limit is None else limit,
            window_bytes=settings.window_bytes,
        )
        return CudaTransfer(self.device, self._registrar)

    def _dtype_of(self, role: str, format_: str) -> torch.dtype:
        exact = role.split(".")[-1] in _FLOAT32_ROLES
        return torch.float32 if exact or (role == "embedding" and format_ != "bf16") else self.dtype

    def _layer_slot(self, layer: int) -> Slot:
        if layer not in self._layer_slots:
            self._release_others(layer)
            self._layer_slots[layer] = self._take(self._plan.linears[layer])
        return self._layer_slots[layer]

    def _release_others(self, layer: int) -> None:
        """Layers that an abandoned pass left behind: their slots would be missing."""
        for other in [held for held in self._layer_slots if held not in (layer - 1, layer)]:
            self.release(other)

    def _take(self, item: Item) -> Slot:
        """A filled slot; what is computed from now on comes after its copies."""
        before = self._transfer.compute_mark()
        slot = self._feeder.take(item.key)
        self._transfer.compute_waits(slot.ready)
        self._stalls.append((before, self._transfer.compute_mark()))
        if len(self._stalls) > 256:  # an old one is past
            self._stall_seconds += self._transfer.seconds(*self._stalls.pop(0))
        return slot

    def _end_group(self) -> None:
        if self._group_slot is not None:
            self._feeder.give_back(*self._group_slot)
            self._group_slot = None

    def _expert_group(self, layer: int, group: Group, slot: Slot) -> ExpertGroup:
        found: dict[str, Weight] = {}
        views, count = False, 0
        for name, layout, data, scale in group.item.parcel.parts(slot):
            count = len(data)
            merged = name == "gate_up"
            out = None
            if is_view(layout, self.dtype) or (not merged and stays_stored(layout, self.dtype)):
                views = True
            else:
                out = self._memory(name, count * layout.rows * layout.cols)
            if not merged:
                found[name] = self._weight_of(layout, data, scale, self.dtype, out)
                continue
            matrix = decode(layout, data, scale, self.dtype, out)
            for first, half in enumerate(("gate", "up")):
                rows = matrix[:, first::2]
                if layout.transposed:  # neither rows nor columns are dense: products would copy
                    rows = self._dense(half, rows)
                found[half] = rows
        if not views:  # decoded: the ring need not wait for the products
            self._end_group()
        biases = {
            f"{name}_bias": values[group.first : group.first + count]
            for name, values in self._layer_biases(layer).items()
        }
        first = self._first_expert + group.first
        return ExpertGroup(first, found["gate"], found["up"], found["down"], **biases)

    def _weight_of(
        self,
        layout: Layout,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> Weight:
        weight = weight_of(layout, data, scale, dtype, out)
        if not self._quantised_inputs or not isinstance(weight, Fp8Matrix):
            return weight
        return dataclasses.replace(
            weight, quantised_inputs=can_quantise(layout.block, layout.inputs)
        )

    def _memory(self, name: str, num_elements: int) -> torch.Tensor:
        """Memory for decoded experts, the same for every group: they come one after another."""
        if name not in self._decoded or len(self._decoded[name]) < num_elements:
            old = self._decoded.pop(name, None)
            if old is not None and old.is_cuda:  # it may be of another stream
                old.record_stream(torch.cuda.current_stream(old.device))
            self._decoded[name] = torch.empty(num_elements, dtype=self.dtype, device=self.device)
        return self._decoded[name]

    def _dense(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        out = self._memory(name, matrix.numel())[: matrix.numel()].view(matrix.shape)
        return out.copy_(matrix)

    def _layer_biases(self, layer: int) -> dict[str, torch.Tensor]:
        if layer not in self._biases:
            biases = self._stored.experts[layer].biases
            self._biases[layer] = {name: self._upload(values) for name, values in biases.items()}
        return self._biases[layer]

    def _copied_now(self, parcel: Parcel) -> Slot:
        """A parcel in memory of its own: the embedding, the head."""
        slot = ring_for([parcel], 1, self._transfer, self.device).get()
        self._transfer.copies_wait(slot.free)
        parcel.fill(slot, self._transfer)
        self._transfer.compute_waits(self._transfer.copy_mark())
        return slot

    def _upload(self, array: NDArray[np.float32] | NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def _multiplies_codes(device: torch.device) -> bool:
    """From Ada on (CUDA programming guide); the CPU device does what they would."""
    return device.type != "cuda" or bool(torch.cuda.get_device_capability(device) >= (8, 9))


def _layer_of(key: str) -> int | None:
    """Of a key "layers.3.q"; None for what belongs to no layer."""
    words = key.split(".")
    return int(words[1]) if words[0] == "layers" else None
