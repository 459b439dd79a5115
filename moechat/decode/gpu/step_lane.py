"""Steps of one batch, each under way while the host serves experts: a stream of a GPU, or a thread.

On CUDA a step of so many rows is captured once as a graph and replayed. Shapes: R rows, V
vocabulary, L layers, W elements of a slot.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.device_cache import DeviceCaches, Mirror
from moechat.decode.gpu.hot_experts import HotExperts
from moechat.decode.gpu.hybrid_step import HybridStep, StepLost, StepOutputs
from moechat.decode.gpu.mailbox import ABORTED
from moechat.decode.gpu.one_thread import OneThread
from moechat.decode.gpu.ops import Mailbox
from moechat.decode.gpu.own_stream import own_stream
from moechat.decode.gpu.resident_weights import ResidentWeights
from moechat.decode.gpu.sm_partition import GpuSharing
from moechat.decode.gpu.step_inputs import MAX_ROWS, RowInput, StepInputs
from moechat.errors import DoesNotFit
from moechat.kv.cache import KVCache

_LIMIT_SECONDS = 30.0  # of one wait for the CPU's experts; an abort ends it at once


@dataclass(frozen=True)
class LaneRow:
    """``token`` at ``position`` is to be stepped at the end of ``cache``."""

    cache: KVCache
    token: int
    position: int


@dataclass(frozen=True)
class LaneResult:
    """In host memory: logits [R, V], slots [L, R, W] as the cache stores them.

    ``bad_layers``: of each row the first layer that gave NaN or infinity, or -1.
    """

    logits_RV: NDArray[np.float32]
    slots_LRW: NDArray[Any]
    bad_layers: list[int]


class StepLane:
    """One step at a time: begin(), then finish(). ``mailbox`` is None without routed experts."""

    def __init__(self, weights: ResidentWeights, caches: DeviceCaches, sharing: GpuSharing) -> None:
        spec, device = weights.spec, weights.device
        self._weights, self._caches, self._device = weights, caches, device
        self._inputs = StepInputs(spec, device)
        self.mailbox: Mailbox | None = None
        if spec.moe is not None and any(layer.moe for layer in spec.layers):
            self.mailbox = Mailbox.create(
                device,
                MAX_ROWS,
                spec.hidden_size,
                spec.moe.num_experts_per_token,
                num_rows=self._inputs.count,
                limit_seconds=_LIMIT_SECONDS,
            )
        self._step = HybridStep(weights, self.mailbox)
        self._runner = _GraphRunner(self, sharing) if device.type == "cuda" else _ThreadRunner(self)
        self.rows: list[LaneRow] = []  # under way
        self._mirrors: list[Mirror] = []

    def hold(self, hot: HotExperts) -> None:
        """Steps use what it holds. Before the first one."""
        self._step.hot = hot

    def prepare(self, num_rows: int) -> None:
        """Capture the graph for so many rows. No step of any lane may be under way."""
        self._runner.prepare(_bucket(num_rows))

    def prepared(self, num_rows: int) -> bool:
        """Whether begin() for so many rows need not capture anything."""
        return self._runner.prepared(_bucket(num_rows))

    def begin(self, rows: Sequence[LaneRow]) -> None:
        """Start a step; the rows' caches are reserved and have room for a slot."""
        assert not self.rows and rows
        self._mirrors = self._caches.sync([row.cache for row in rows])
        inputs = []
        for row, mirror in zip(rows, self._mirrors):
            begin_L, own_L = self._caches.visible(row.cache, mirror, row.position)
            inputs.append(RowInput(row.position, mirror.slab, begin_L, own_L))
        self._inputs.set(self._weights.embed([row.token for row in rows]), inputs)
        self.rows = list(rows)
        self._runner.begin(_bucket(len(rows)))

    def finish(self) -> LaneResult:
        """Wait for the step; what it gave. The new slots are in the native caches then, too.

        Raises StepLost, or what went wrong; both mailbox sides must then be reset.
        """
        rows, self.rows = self.rows, []
        host = self._runner.finish(_bucket(len(rows)))
        slots_LRW = _stored(host.slots_LRW[:, : len(rows)])
        finite_LR = host.finite_LR.numpy()
        for r, (row, mirror) in enumerate(zip(rows, self._mirrors)):
            positions, native = np.array([row.position], np.int32), row.cache.native
            for layer in range(len(slots_LRW)):
                native.append(layer, positions, slots_LRW[layer, r : r + 1])
            native.settle()  # sliding windows let go of what left them
            self._caches.appended(mirror)
        bad = [-1 if column.all() else int(column.argmin()) for column in finite_LR.T]
        return LaneResult(host.logits_RV[: len(rows)].numpy(), slots_LRW, bad[: len(rows)])

    def ended(self) -> bool:
        """Whether the step under way has come to its end, well or not."""
        return self._runner.ended()

    def lost(self) -> bool:
        """Whether finish() will raise, at once."""
        return self._runner.ended() and self._runner.lost()

    def abandon(self) -> None:
        """Wait for the step under way, if there is one: its mailbox is aborted."""
        if self.rows:
            rows, self.rows = self.rows, []
            with contextlib.suppress(Exception):  # it is lost in any case
                self._runner.finish(_bucket(len(rows)))

    def reset(self) -> None:
        """After a lost step: the client's side as new."""
        if self.mailbox is not None:
            self.mailbox.reset()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Wait for what is under way, and let go of everything. The mailbox must be aborted."""
        self._runner.close()

    def run(self, rows: int) -> StepOutputs:
        """The whole step on the current stream."""
        with torch.inference_mode():
            self._inputs.fetch(rows)
            return self._step.run(self._inputs, self._caches.slots_SCW, rows)

    def failed(self) -> bool:
        """Whether a wait gave up. Waits for the device."""
        return self.mailbox is not None and int(self.mailbox.error) != 0

    @property
    def version(self) -> int:
        """Of the addresses that a graph holds."""
        return self._caches.version

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self._device

    def be_nobody(self) -> None:
        """The next step's inputs are of no row."""
        self._inputs.set(np.empty((0, self._weights.spec.hidden_size), np.float32), [])


class _ThreadRunner:
    """Steps on a thread of their own, operation by operation."""

    def __init__(self, lane: StepLane) -> None:
        self._lane = lane
        self._thread = OneThread("hybrid-step")
        self._future: Future[StepOutputs] | None = None

    def prepare(self, rows: int) -> None:
        """Nothing to do."""

    def prepared(self, rows: int) -> bool:
        return True

    def begin(self, rows: int) -> None:
        self._future = self._thread.submit(functools.partial(self._run, rows))

    def _run(self, rows: int) -> StepOutputs:
        try:
            return self._lane.run(rows)
        except BaseException:
            if self._lane.mailbox is not None:  # whoever serves it is not to wait for the rest
                self._lane.mailbox.abort.fill_(1)
            raise

    def finish(self, rows: int) -> StepOutputs:
        assert self._future is not None
        future, self._future = self._future, None
        outputs = future.result()
        if self._lane.failed():
            raise StepLost
        return outputs

    def ended(self) -> bool:
        return self._future is None or self._future.done()

    def lost(self) -> bool:
        future = self._future
        return future is not None and (future.exception() is not None or self._lane.failed())

    def close(self) -> None:
        self._thread.close()
        del self._lane  # which refers to this: nothing is to wait for the collector


@dataclass(frozen=True)
class _Graph:
    graph: Any
    outputs: StepOutputs  # on the device
    host: StepOutputs  # page-locked


class _GraphRunner:
    """Graphs on streams of their own, by their number of rows: for the device, and for a part."""

    def __init__(self, lane: StepLane, sharing: GpuSharing) -> None:
        self._lane, self._device, self._sharing = lane, lane.device, sharing
        self._streams = [own_stream(self._device)]
        if sharing.parts is not None:
            self._streams.append(sharing.parts.decode)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._version = -1
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        self._host: StepOutputs | None = None  # of the step under way

    def prepared(self, rows: int) -> bool:
        return (rows, False) in self._graphs and self._version == self._lane.version

    def prepare(self, rows: int) -> None:
        if self.prepared(rows):
            return
        if self._version != self._lane.version:
            self._graphs, self._version = {}, self._lane.version
        for in_part, stream in enumerate(self._streams):
            self._graphs[rows, bool(in_part)] = self._captured(rows, stream)

    def _captured(self, rows: int, stream: Any) -> _Graph:
        mailbox = self._lane.mailbox
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            if mailbox is not None:
                mailbox.error.fill_(ABORTED)  # nobody serves: posts and waits return at once
            self._lane.be_nobody()  # the last step's rows would write to their slots once more
            try:
                graph, outputs = self._capture(rows, stream)
            except torch.OutOfMemoryError as error:
                raise DoesNotFit(
                    "a step does not fit the device's memory", str(error).partition("\n")[0]
                ) from None
            finally:
                if mailbox is not None:
                    mailbox.error.zero_()
                stream.synchronize()
        host = StepOutputs(
            *(
                torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                for part in (outputs.logits_RV, outputs.slots_LRW, outputs.finite_LR)
            )
        )
        return _Graph(graph, outputs, host)

    def _capture(self, rows: int, stream: Any) -> tuple[Any, StepOutputs]:
        self._lane.run(rows)  # kernels are compiled and libraries loaded before a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # nothing of the device's is to be destroyed while it is captured
        # Not torch.cuda.graph: that waits for a prompt's kernels on the same card as well.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = self._lane.run(rows)
        finally:
            graph.capture_end()
        return graph, outputs

    def begin(self, rows: int) -> None:
        in_part = self._sharing.beside_a_prompt
        own, stream = self._graphs[rows, in_part], self._streams[in_part]
        # What filled the caches ran on the decode thread's stream.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            own.graph.replay()
            for name in ("logits_RV", "slots_LRW", "finite_LR"):
                getattr(own.host, name).copy_(getattr(own.outputs, name), non_blocking=True)
            if self._lane.mailbox is not None:
                self._error.copy_(self._lane.mailbox.error, non_blocking=True)
            self._done.record(stream)
        self._host = own.host

    def finish(self, rows: int) -> StepOutputs:
        self._done.synchronize()
        if int(self._error) != 0:
            raise StepLost
        assert self._host is not None
        return self._host

    def ended(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call, unused-ignore]

    def lost(self) -> bool:
        return int(self._error) != 0

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that failed has nothing to wait for
            for stream in self._streams:
                stream.synchronize()
        self._graphs = {}
        del self._lane


def _bucket(rows: int) -> int:
    """The least power of two that holds so many rows."""
    return 1 << (rows - 1).bit_length()


def _stored(slots: torch.Tensor) -> NDArray[Any]:
    """Slots as the native cache takes them: uint16 holds the bits of BF16."""
    if slots.dtype == torch.bfloat16:
        array: NDArray[Any] = slots.contiguous().view(torch.int16).numpy().view(np.uint16)
        return array
    return np.ascontiguousarray(slots.numpy())
