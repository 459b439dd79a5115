"""Steps of one batch, each under way while the host serves experts: a stream of a GPU, or a thread.

On CUDA a step of so many rows is captured once as a graph and replayed. Shapes: R rows, V
vocabulary, L layers, W elements of a slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.device_cache import DeviceCaches, Mirror
from moechat.decode.gpu.hot_experts import HotExperts
from moechat.decode.gpu.hybrid_step import HybridStep, StepLost, StepOutputs
from moechat.decode.gpu.mailbox import ABORTED
from moechat.decode.gpu.ops import Mailbox
from moechat.decode.gpu.resident_weights import ResidentWeights
from moechat.decode.gpu.step_inputs import MAX_ROWS, RowInput, StepInputs
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

    def __init__(self, weights: ResidentWeights, caches: DeviceCaches) -> None:
        spec, device = weights.spec, weights.device
        self._weights, self._caches, self._device = weights, caches, device
        self.mailbox: Mailbox | None = None
        if spec.moe is not None and any(layer.moe for layer in spec.layers):
            self.mailbox = Mailbox.create(
                device,
                MAX_ROWS,
                spec.hidden_size,
                spec.moe.num_experts_per_token,
                limit_seconds=_LIMIT_SECONDS,
            )
        self._inputs = StepInputs(spec, device)
        self._step = HybridStep(weights, self.mailbox)
        self._runner = _GraphRunner(self) if device.type == "cuda" else _ThreadRunner(self)
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
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for what is under way, and let go of everything. The mailbox must be aborted."""
        self._runner.close()

    def send_and_run(self, rows: int) -> StepOutputs:
        """The whole step on the current stream."""
        with torch.inference_mode():
            self._inputs.send()
            return self.run(rows)

    def run(self, rows: int) -> StepOutputs:
        """Without the inputs' way to the device."""
        with torch.inference_mode():
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

    def send(self) -> None:
        """The inputs, on the current stream."""
        self._inputs.send()

    def send_nothing(self) -> None:
        """Inputs of a step of nobody."""
        self._inputs.set(np.empty((0, self._weights.spec.hidden_size), np.float32), [])
        self._inputs.send()


class _ThreadRunner:
    """Steps on a thread of their own, operation by operation."""

    def __init__(self, lane: StepLane) -> None:
        self._lane = lane
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hybrid-step")
        self._future: Future[StepOutputs] | None = None

    def prepare(self, rows: int) -> None:
        """Nothing to do."""

    def prepared(self, rows: int) -> bool:
        return True

    def begin(self, rows: int) -> None:
        self._future = self._executor.submit(self._run, rows)

    def _run(self, rows: int) -> StepOutputs:
        try:
            return self._lane.send_and_run(rows)
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

    def close(self) -> None:
        self._executor.shutdown()


@dataclass(frozen=True)
class _Graph:
    graph: Any
    outputs: StepOutputs  # on the device
    host: StepOutputs  # page-locked


class _GraphRunner:
    """Graphs on a stream of their own, by their number of rows."""

    def __init__(self, lane: StepLane) -> None:
        self._lane, self._device = lane, lane.device
        # Before a prompt's kernels on the same card.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call, unused-ignore]
        self._graphs: dict[int, _Graph] = {}
        self._version = -1
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def prepared(self, rows: int) -> bool:
        return rows in self._graphs and self._version == self._lane.version

    def prepare(self, rows: int) -> None:
        if self.prepared(rows):
            return
        if self._version != self._lane.version:
            self._graphs, self._version = {}, self._lane.version
        mailbox = self._lane.mailbox
        torch.cuda.synchronize(self._device)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if mailbox is not None:
                mailbox.error.fill_(ABORTED)  # nobody serves: posts and waits return at once
            self._lane.send_nothing()  # the last step's rows would write to their slots once more
            self._lane.run(rows)  # kernels are compiled and libraries loaded before a capture
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self._lane.run(rows)
            if mailbox is not None:
                mailbox.error.zero_()
            self._stream.synchronize()
        host = StepOutputs(
            *(
                torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                for part in (outputs.logits_RV, outputs.slots_LRW, outputs.finite_LR)
            )
        )
        self._graphs[rows] = _Graph(graph, outputs, host)

    def begin(self, rows: int) -> None:
        if not self.prepared(rows):
            self.prepare(rows)
        own = self._graphs[rows]
        # What filled the caches ran on the default stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._lane.send()
            own.graph.replay()
            for name in ("logits_RV", "slots_LRW", "finite_LR"):
                getattr(own.host, name).copy_(getattr(own.outputs, name), non_blocking=True)
            if self._lane.mailbox is not None:
                self._error.copy_(self._lane.mailbox.error, non_blocking=True)
            self._done.record(self._stream)

    def finish(self, rows: int) -> StepOutputs:
        self._done.synchronize()
        if int(self._error) != 0:
            raise StepLost
        return self._graphs[rows].host

    def ended(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call, unused-ignore]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that failed has nothing to wait for
            self._stream.synchronize()
        self._graphs = {}


def _bucket(rows: int) -> int:
    """The least power of two that holds so many rows."""
    return 1 << (rows - 1).bit_length()


def _stored(slots: torch.Tensor) -> NDArray[Any]:
    """Slots as the native cache takes them: uint16 holds the bits of BF16."""
    if slots.dtype == torch.bfloat16:
        array: NDArray[Any] = slots.contiguous().view(torch.int16).numpy().view(np.uint16)
        return array
    return np.ascontiguousarray(slots.numpy())
