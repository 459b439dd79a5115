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
from moechat.decode.gpu.hot_experts import HotExperts, Uses
from moechat.decode.gpu.hybrid_step import StepLost
from moechat.decode.gpu.lane_choice import LaneChoice
from moechat.decode.gpu.own_stream import on_stream, own_stream
from moechat.decode.gpu.resident_weights import ResidentWeights
from moechat.decode.gpu.sm_partition import GpuSharing
from moechat.decode.gpu.step_inputs import MAX_ROWS
from moechat.decode.gpu.step_lane import LaneRow, StepLane
from moechat.errors import MoechatError
from moechat.kv.cache import KVCache
from moechat.models.spec import BoundTensor, ModelSpec

_READER_PAUSE_SECONDS = 1e-3
_POLL_SECONDS = 2e-3  # between looks at the cancel flags during a step
# Of a step's time, how much may go to exchanging held experts before the next one, and at most.
_EXCHANGE_SHARE, _EXCHANGE_SECONDS = 0.2, 0.05


@dataclass
class _Batch:
    members: list[Decoding]
    num_steps: int = field(default=0)


class HybridDecode:
    """Weights, caches, and lanes on one device, with the server of their experts.

    Used by the decode thread alone. ``anti_phase``: two lanes as soon as two sessions decode; None:
    where that is faster than one batch.
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
        anti_phase: bool | None = None,
        kv_limit_bytes: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self.name = "torch-cpu" if self._device.type == "cpu" else str(device)
        self.sharing = GpuSharing(self._device)
        # What this thread asks of the device waits for nothing that a prompt asks of it.
        self._stream = own_stream(self._device)
        windows = [layer.window for layer in spec.layers]
        dtype = torch.float32 if compute == "exact" else torch.bfloat16
        with on_stream(self._stream):
            self.weights = ResidentWeights(spec, tensors, device=self._device, compute=compute)
            self.caches = DeviceCaches(
                windows, spec.kv_width, device=self._device, dtype=dtype, limit_bytes=kv_limit_bytes
            )
            self.lanes = [
                StepLane(self.weights, self.caches, self.sharing)
                for _ in range(1 if anti_phase is False else 2)
            ]
        self._moe_layers = [number for number, layer in enumerate(spec.layers) if layer.moe]
        self._choice = LaneChoice() if anti_phase is None else None
        self.hot: HotExperts | None = None
        self._step_seconds = 0.0  # of the last steps, on average; 0: the next token goes first
        mailboxes = [lane.mailbox for lane in self.lanes if lane.mailbox is not None]
        self._experts = ExpertThread(model, pool, mailboxes) if mailboxes else None

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
        with on_stream(self._stream):
            return self._generate(members, interrupt, max_steps)

    def _generate(
        self, members: Sequence[Decoding], interrupt: _native.CancelFlag, max_steps: int
    ) -> int:
        num_steps = 0
        while _all_go_on(members):
            if num_steps and (interrupt.raised or 0 < max_steps <= num_steps):
                break
            ready: list[Decoding] = []
            aside: list[Decoding] = []
            for member in members:
                (ready if member.generation.queue_room > 0 else aside).append(member)
            if not ready:
                time.sleep(_READER_PAUSE_SECONDS)
                if max_steps or interrupt.raised:  # the caller has other work meanwhile
                    break
                continue
            left = max(0, max_steps - num_steps) if max_steps else 0
            if self.hot is not None and self.hot.exchanging:
                left = 1
                if self._step_seconds:
                    share_seconds = _EXCHANGE_SHARE * self._step_seconds
                    self.hot.advance(min(share_seconds, _EXCHANGE_SECONDS))
            began = time.monotonic()
            steps = self._run(ready, aside, interrupt, left)
            self._step_seconds = (time.monotonic() - began) / max(1, steps)
            num_steps += steps
        return num_steps

    def hold_experts(self, count: int) -> int:
        """So many routed experts of each layer are the device's, and the CPU leaves them out.

        They are those that the prompt used most which prompt_read() told of last; none at first.
        Before the first step. Returns the bytes of the room for them. Raises BadParameter where
        experts cannot be held, DoesNotFit.
        """
        with on_stream(self._stream):
            self.hot = HotExperts(
                self.weights.spec,
                self.weights.stored,
                count,
                device=self._device,
                compute=self.weights.compute,
                changed=self._changed,
            )
        for lane in self.lanes:
            lane.hold(self.hot)
        return self.hot.num_bytes

    def prompt_read(self, expert_uses: Mapping[int, Uses]) -> None:
        """How often a prompt went to each expert, by layer: its answer is next."""
        if self.hot is not None:
            self.hot.want(expert_uses)
            self._step_seconds = 0.0

    @property
    def num_gpu_experts(self) -> int:
        """Routed experts of a layer that the device has room for."""
        hot = self.hot
        return 0 if hot is None else hot.count

    @property
    def num_held_experts(self) -> int:
        """Those that it holds, of a layer on average. From any thread."""
        hot = self.hot
        return 0 if hot is None else hot.num_held

    def truncated(self, cache: KVCache) -> None:
        """``cache`` was truncated just now."""
        self.caches.truncated(cache)

    def close(self) -> None:
        """Let go of the device's memory."""
        self._abort()
        with on_stream(self._stream):
            for lane in self.lanes:
                lane.close()
        self.lanes, self.hot = [], None
        if self._experts is not None:
            self._experts.close()

    def _run(
        self,
        ready: list[Decoding],
        aside: list[Decoding],
        interrupt: _native.CancelFlag,
        max_steps: int,
    ) -> int:
        """Steps of batches that stay as they are, until something changes; all done at the end.

        One of each at least. ``aside``: sessions that had no room for a token.
        """
        self.caches.reserve([member.cache for member in ready])
        count, trial = max(min(len(self.lanes), len(ready)), -(-len(ready) // MAX_ROWS)), False
        if self._choice is not None and 1 < len(ready) <= MAX_ROWS:
            turns, steps = self._choice.next(len(ready))
            count, trial = 1 + turns, True
            max_steps = min(max_steps, steps) if max_steps else steps
        waiting = collections.deque(_batches(ready, count))
        batches = list(waiting)
        for lane in self.lanes[:count]:
            for batch in batches:
                lane.prepare(len(batch.members))
        began = time.monotonic()
        running: dict[int, _Batch] = {}  # by the lane's number
        try:
            if self._experts is not None:
                self._experts.start()
            goes_on = True
            while True:
                for number in range(len(self.lanes)):
                    due = waiting and (goes_on or waiting[0].num_steps == 0)
                    if due and number not in running:
                        running[number] = batch = waiting.popleft()
                        self._begin(self.lanes[number], batch)
                if not running:
                    break
                number = self._served(running)
                batch = running.pop(number)
                goes_on = self._finish(self.lanes[number], batch) and goes_on
                if max_steps == 0 or batch.num_steps < max_steps:
                    waiting.append(batch)
                goes_on = goes_on and not interrupt.raised and self._may_follow(batch, aside)
        except BaseException as error:
            self._recover()
            for member in ready:  # what was appended of a step that was not sampled
                member.cache.native.truncate(member.generation.position)
                self.caches.clip(member.cache)
            if isinstance(error, StepLost):
                if self._experts is not None and self._experts.failure is not None:
                    raise self._experts.failure from None
                if any(not member.generation.goes_on() for member in ready):
                    return max(batch.num_steps for batch in batches)
                raise MoechatError(
                    "a step on the GPU was lost", "the CPU's experts did not answer it in time"
                ) from None
            raise
        if self._experts is not None:
            if any(map(self._experts.server.aborted, range(len(self.lanes)))):
                self._recover()  # the step was over by then
            else:
                self._experts.stop()
        steps = max(batch.num_steps for batch in batches)
        if self._choice is not None and trial:
            self._choice.took(len(ready), count > 1, steps, time.monotonic() - began)
        return steps

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
            for number in running:
                if self._experts.server.aborted(number):
                    return number
            news, look = self._experts.ended(_POLL_SECONDS)
            if news is not None:
                return news
            if all(member.cancel.raised for member in members):
                self._abort()
            elif look:  # what ended well is in the news, if not before this look
                for number in running:
                    if self.lanes[number].lost():
                        return number

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

    def _may_follow(self, batch: _Batch, aside: list[Decoding]) -> bool:
        """Whether the same batch can step once more without a look at all the others."""
        room = all(member.generation.queue_room > 0 for member in batch.members)
        return (
            room
            and not any(member.generation.queue_room > 0 for member in aside)
            and _all_go_on([*batch.members, *aside])
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

    def _changed(self, layer: int, ids: Sequence[int]) -> None:
        """The device holds other experts of a layer."""
        if self._experts is not None:
            self._experts.server.set_gpu_experts(self._moe_layers.index(layer), list(ids))

    def _abort(self) -> None:
        """No lane waits for experts any longer."""
        if self._experts is not None:
            for number in range(len(self.lanes)):
                self._experts.server.abort(number)


def _batches(ready: list[Decoding], count: int) -> list[_Batch]:
    size, more = divmod(len(ready), count)
    begins = [number * size + min(number, more) for number in range(count + 1)]
    return [_Batch(ready[begin:end]) for begin, end in itertools.pairwise(begins)]


def _all_go_on(members: Sequence[Decoding]) -> bool:
    """Marks each that does not."""
    going = [member.generation.goes_on() for member in members]
    return all(going)
