"""The decode loop where a torch device has all but the routed experts: steps of up to two batches.

While the device is at one batch's attention, the CPU is at the other's experts: dual-batch overlap.
No bit of a row depends on its batch, so neither do the tokens.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat import _native
from moechat.decode.device_decode import Decoding
from moechat.decode.gpu.device_cache import DeviceCaches
from moechat.decode.gpu.expert_thread import ExpertThread
from moechat.decode.gpu.hot_experts import HotExperts
from moechat.decode.gpu.hybrid_step import StepLost
from moechat.decode.gpu.resident_weights import ResidentWeights
from moechat.decode.gpu.step_inputs import MAX_ROWS
from moechat.decode.gpu.step_lane import LaneRow, StepLane
from moechat.errors import MoechatError
from moechat.kv.cache import KVCache
from moechat.models.spec import BoundTensor, ModelSpec

_READER_PAUSE_SECONDS = 1e-3
_POLL_SECONDS = 2e-3  # between looks at the cancel flags during a step


@dataclass
class _Batch:
    members: list[Decoding]
    num_steps: int = field(default=0)


class HybridDecode:
    """Weights, caches, and lanes on one device, with the server of their experts.

    Used by the decode thread alone. ``anti_phase``: two lanes as soon as two sessions decode.
    ``gpu_experts``: by layer, routed experts that the device has and the CPU leaves out.
    Raises BadParameter for weights of formats that no GPU path reads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[BoundTensor],
        model: _native.Model,
        pool: _native.ThreadPool,
        *,
        device: torch.device | str,
        compute: str = "bf16",
        anti_phase: bool = True,
        kv_limit_bytes: int | None = None,
        gpu_experts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self.name = "torch-cpu" if self._device.type == "cpu" else str(device)
        self.weights = ResidentWeights(spec, tensors, device=self._device, compute=compute)
        windows = [layer.window for layer in spec.layers]
        dtype = torch.float32 if compute == "exact" else torch.bfloat16
        self.caches = DeviceCaches(
            windows, spec.kv_width, device=self._device, dtype=dtype, limit_bytes=kv_limit_bytes
        )
        hot = None
        if gpu_experts:
            hot = HotExperts(
                spec, self.weights.stored, gpu_experts, device=self._device, compute=compute
            )
        self.lanes = [
            StepLane(self.weights, self.caches, hot) for _ in range(2 if anti_phase else 1)
        ]
        mailboxes = [lane.mailbox for lane in self.lanes if lane.mailbox is not None]
        self._experts = ExpertThread(model, pool, mailboxes) if mailboxes else None
        moe_layers = [layer for layer, each in enumerate(spec.layers) if each.moe]
        for layer, ids in (gpu_experts or {}).items():
            if self._experts is not None:
                self._experts.server.set_gpu_experts(moe_layers.index(layer), list(ids))

    @property
    def server(self) -> _native.ExpertServer | None:
        """Of the routed experts; None where the model has none."""
        return None if self._experts is None else self._experts.server

    def generate(
        self, members: Sequence[Decoding], interrupt: _native.CancelFlag, max_steps: int
    ) -> int:
        """As generate() of cpp/decode/generate.h: the steps that each batch did at most.

        What is raised is raised for all; the native caches then hold the tokens before the step.
        DoesNotFit, before a step: the sessions' caches need more memory than there is.
        """
        num_steps = 0
        while _all_go_on(members):
            if num_steps and (interrupt.raised or 0 < max_steps <= num_steps):
                break
            ready = [member for member in members if member.generation.queue_room > 0]
            if not ready:
                time.sleep(_READER_PAUSE_SECONDS)
                if max_steps or interrupt.raised:  # the caller has other work meanwhile
                    break
                continue
            left = max(0, max_steps - num_steps) if max_steps else 0
            num_steps += self._run(ready, interrupt, left)
        return num_steps

    def truncated(self, cache: KVCache) -> None:
        """``cache`` was truncated just now."""
        self.caches.truncated(cache)

    def close(self) -> None:
        """Let go of the device's memory."""
        self._abort()
        for lane in self.lanes:
            lane.close()
        self.lanes = []
        if self._experts is not None:
            self._experts.close()

    def _run(self, ready: list[Decoding], interrupt: _native.CancelFlag, max_steps: int) -> int:
        """Steps of batches that stay as they are, until something changes; all done at the end."""
        self.caches.reserve([member.cache for member in ready])
        waiting = collections.deque(self._batches(ready))
        batches = list(waiting)
        for lane in self.lanes[: len(batches)]:
            for batch in batches:
                lane.prepare(len(batch.members))
        running: dict[int, _Batch] = {}  # by the lane's number
        try:
            if self._experts is not None:
                self._experts.start()
            goes_on = True
            while running or (goes_on and waiting):
                for number in range(len(self.lanes)):
                    if goes_on and waiting and number not in running:
                        running[number] = batch = waiting.popleft()
                        self._begin(self.lanes[number], batch)
                number = self._served(running)
                batch = running.pop(number)
                goes_on = self._finish(self.lanes[number], batch) and goes_on
                if max_steps == 0 or batch.num_steps < max_steps:
                    waiting.append(batch)
                goes_on = goes_on and not interrupt.raised and self._may_follow(batch)
        except BaseException as error:
            self._recover()
            for member in ready:  # what was appended of a step that was not sampled
                member.cache.native.truncate(member.generation.position)
                self.caches.clip(member.cache)
            if isinstance(error, StepLost):
                if any(not member.generation.goes_on() for member in ready):
                    return max(batch.num_steps for batch in batches)
                raise MoechatError(
                    "a step on the GPU was lost", "the CPU's experts did not answer it in time"
                ) from None
            raise
        if self._experts is not None:
            self._experts.stop()
        return max(batch.num_steps for batch in batches)

    def _batches(self, ready: list[Decoding]) -> list[_Batch]:
        count = max(min(len(self.lanes), len(ready)), -(-len(ready) // MAX_ROWS))
        size, more = divmod(len(ready), count)
        begins = [number * size + min(number, more) for number in range(count + 1)]
        return [_Batch(ready[begin:end]) for begin, end in itertools.pairwise(begins)]

    def _begin(self, lane: StepLane, batch: _Batch) -> None:
        lane.begin(
            [
                LaneRow(member.cache, member.generation.token, member.generation.position)
                for member in batch.members
            ]
        )

    def _served(self, running: dict[int, _Batch]) -> int:
        """Wait until a lane has got all experts of its step, or will not get them."""
        if self._experts is None:
            return next(iter(running))
        members = [member for batch in running.values() for member in batch.members]
        while True:
            number, look = self._experts.ended(_POLL_SECONDS)
            if number is not None:
                return number
            if all(member.cancel.raised for member in members):
                self._abort()
                return next(iter(running))
            for lane in running:
                if look and (self._experts.server.aborted(lane) or self.lanes[lane].ended()):
                    return lane

    def _finish(self, lane: StepLane, batch: _Batch) -> bool:
        """Sample what follows; False when one has finished."""
        result = lane.finish()
        batch.num_steps += 1
        going = True
        for member, row, bad in zip(batch.members, result.logits_RV, result.bad_layers):
            if not member.generation.advance(row, bad):
                self.caches.clip(member.cache)  # a failed one's cache was truncated
                going = False
        return going

    def _may_follow(self, batch: _Batch) -> bool:
        """Whether the same batch can step once more without a look at all the others."""
        room = all(member.generation.queue_room > 0 for member in batch.members)
        return (
            room
            and _all_go_on(batch.members)
            and self.caches.has_room([m.cache for m in batch.members])
        )

    def _recover(self) -> None:
        """Nothing is under way any more, and both sides of all mailboxes are as new."""
        self._abort()
        for lane in self.lanes:
            lane.abandon()
        if self._experts is not None:
            self._experts.stop()
        for number, lane in enumerate(self.lanes):
            lane.reset()
            if self._experts is not None:
                self._experts.server.reset(number)

    def _abort(self) -> None:
        """No lane waits for experts any longer."""
        if self._experts is not None:
            for number in range(len(self.lanes)):
                self._experts.server.abort(number)


def _all_go_on(members: Sequence[Decoding]) -> bool:
    """Marks each that does not."""
    going = [member.generation.goes_on() for member in members]
    return all(going)
