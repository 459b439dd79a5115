"""The engine: one model, its thread pool, its prefill and decode threads, its sessions."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from moechat import _native
from moechat.decode.worker import DecodeWorker
from moechat.engine import admission, flow
from moechat.engine.gpus import Gpus, open_gpus
from moechat.engine.kv_choice import choose_policy, named_policy
from moechat.engine.loading import choose_instruction_set, load_model
from moechat.engine.model_files import ModelFiles
from moechat.engine.parameters import check_choice, check_devices, chosen_context
from moechat.engine.requests import ExtendRequest, GenerateRequest, Handle
from moechat.engine.resident import Nodes, Progress, Residency, make_resident
from moechat.engine.session import Session
from moechat.engine.snapshot import KVSnapshot, model_fingerprint
from moechat.errors import (
    BadParameter,
    EngineClosed,
    PromptTooLong,
    TextUnavailable,
    from_native,
)
from moechat.kv.policy import NAMES
from moechat.prefill.choice import DeviceChoice
from moechat.prefill.cpu import CpuDevice
from moechat.prefill.passes import Passes
from moechat.prefill.worker import PrefillWorker
from moechat.registry import load_registry
from moechat.sample.params import SamplingParams
from moechat.weights.free_memory import free_memory_bytes

if TYPE_CHECKING:
    from moechat.engine.text import TextModel

CHANNEL_PACKETS = 8  # KV packets that may wait for the decode thread


class Engine:
    """Open a model with ``Engine.open``, talk through ``session()``, end with ``close()``."""

    def __init__(
        self,
        path: Path,
        *,
        name: str = "",
        compute: str = "bf16",
        threads: int | None = None,
        context_tokens: int | None = None,
        channel_packets: int = CHANNEL_PACKETS,
        kv: str = "native",
        kv_budget: float | None = None,
        kv_link_bytes_per_second: float | None = None,
        speculate: bool = False,
        resident: bool = False,
        decode_share: float = 0.5,
        device: str = "cpu",
        gpu_memory_bytes: int | None = None,
        gpu_prefill_tokens: int | None = None,
        gpu_decode: str = "off",
        gpu_experts: int | str = 0,
        suspended_bytes: int | None = None,
        nodes: Nodes | None = None,
        progress: Progress | None = None,
    ) -> None:
        """As ``open``. ``nodes``: NUMA nodes in place of the machine's own.

        ``kv_link_bytes_per_second``: of the way from prefill to decode; None: shared memory.
        """
        self.name = name or path.name
        self.compute = "bf16" if compute == "w8a8" else compute  # of the KV cache, and of the CPU
        self.instruction_set = choose_instruction_set()
        self.speculate = speculate
        wanted = check_devices(
            device,
            compute=compute,
            speculate=speculate,
            gpu_memory_bytes=gpu_memory_bytes,
            gpu_prefill_tokens=gpu_prefill_tokens,
            gpu_decode=gpu_decode,
            gpu_experts=gpu_experts,
        )
        self.model = load_model(path, self.compute, speculate=speculate, keep_tensors=wanted)
        self.spec = self.model.spec
        self.context_tokens = chosen_context(context_tokens, self.spec.context_tokens)
        # How the KV of a prompt crosses from now on; may be replaced between two requests.
        self.kv_policy = named_policy(kv, kv_budget, self.spec, self.model.files)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()  # close() against requests that begin
        self._numbers = itertools.count()
        self._process = os.getpid()
        try:
            if nodes is None:
                nodes = _native.numa_nodes()
            pool = _native.ThreadPool(
                _native.available_cpus() if threads is None else threads, nodes, pin=resident
            )
            pool.set_decode_share(decode_share)
        except _native.NativeError as error:
            raise from_native(*error.args) from error
        self.threads, self.pool = pool.num_threads, pool
        self.residency: Residency | None = None
        if resident:
            self.residency = make_resident(self.model, pool, nodes, progress)
        self.drafter = _native.MtpDrafter(self.model.native, pool) if speculate else None
        gpus = Gpus()
        if wanted:
            gpus = open_gpus(
                device,
                self.model,
                pool,
                compute=compute,
                memory_bytes=gpu_memory_bytes,
                context_tokens=self.context_tokens,
                decode="off" if speculate else gpu_decode,  # drafts are the CPU's
                gpu_experts=gpu_experts,
            )
        self.decode = DecodeWorker(self.model.native, pool, channel_packets)
        if gpus.decode is not None:
            self.decode.device = gpus.decode
        self._device_notice = gpus.notice
        self.prefill_choice = DeviceChoice(
            CpuDevice(self.model.native, pool), gpus.prefill, gpu_prefill_tokens
        )
        passes = Passes(self.spec, self.prefill_choice, self.decode.channel, suspended_bytes)
        self.prefill = PrefillWorker(passes, self.decode.channel)
        # Runs at close(), when the engine is dropped, and at interpreter exit.
        self._shut_down = weakref.finalize(
            self,
            _shut_down,
            self._sessions,
            self.prefill,
            self.decode,
            gpus,
            self.residency,
            self.model.files,
        )
        if kv == "auto":
            self.kv_policy = choose_policy(self, kv_budget, kv_link_bytes_per_second)

    @classmethod
    def open(
        cls,
        source: str | Path,
        *,
        compute: str = "bf16",
        threads: int | None = None,
        device: str = "cpu",
        kv: str = "native",
        kv_budget: float | None = None,
        context_tokens: int | None = None,
        speculate: bool = False,
        resident: bool = False,
        decode_share: float = 0.5,
        gpu_memory_bytes: int | None = None,
        gpu_prefill_tokens: int | None = None,
        gpu_decode: str = "off",
        gpu_experts: int | str = 0,
        suspended_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a registry name, a folder in Hugging Face layout, or a GGUF file.

        ``compute`` is "bf16" or "exact" (float32 throughout), or "w8a8": bf16, but FP8 weights are
        multiplied with inputs of 8 bits where a GPU reads prompts, less exactly and sooner.
        ``context_tokens`` defaults to the trained length. ``kv`` is the policy by which a prompt's
        KV crosses from prefill to decode, a name of ``moechat.kv.policy.NAMES``, or "auto": native
        in shared memory. ``kv_budget`` in (0, 1] is what spectrum, pdtrim and snapkv may send, of 2
        bytes an element; by default 0.5, and for spectrum what drops no token if that is more. The
        tiers of spectrum are those that ``moechat eval probe`` found the model to bear, otherwise
        FP16 and INT8. ``speculate`` drafts tokens with the model's multi-token-prediction layer:
        the same text, at another speed; BadParameter when the model has none. ``resident`` copies
        the MLPs into huge pages, a share to each NUMA node, and calls ``progress(bytes done, bytes
        in all)`` meanwhile. ``decode_share``, between 0 and 1, is what decode gets of the threads
        while a prompt is prefilled at the same time.

        ``device`` reads long prompts: "cpu", "cuda" (the first GPU), "cuda:1", "cuda:0,cuda:1" or
        "cuda:all", or "auto", which takes the first GPU that torch can use, for a model that is not
        small. Weights stream through ``gpu_memory_bytes`` of each GPU, by default what is free.
        Prompts of ``gpu_prefill_tokens`` new tokens or more go there; None: those that take less
        time there, as far as that was measured. ``gpu_decode`` "on" has the first GPU make decode's
        steps but for the routed experts, "auto" where it has room for all their other weights and
        nothing is drafted. ``gpu_experts`` of each layer's are held there all the same, those that
        the prompt which a GPU read last used most; "auto": as many as there is memory for that
        prompts do not need. What a GPU had read of a cancelled prompt is kept for the same one in
        ``suspended_bytes`` of host memory, by default a 16th of what is free and 8 GiB at most.

        Raises ModelNotFound, CheckpointDamaged, ArchitectureUnsupported, BadParameter, DoesNotFit,
        DeviceUnavailable.
        """
        check_choice("compute", compute, ("bf16", "exact", "w8a8"))
        check_choice("kv", kv, ("auto", *NAMES))
        model = load_registry().resolve(str(source))
        return cls(
            model.path,
            name=model.name,
            compute=compute,
            threads=threads,
            kv=kv,
            kv_budget=kv_budget,
            context_tokens=context_tokens,
            speculate=speculate,
            resident=resident,
            decode_share=decode_share,
            device=device,
            gpu_memory_bytes=gpu_memory_bytes,
            gpu_prefill_tokens=gpu_prefill_tokens,
            gpu_decode=gpu_decode,
            gpu_experts=gpu_experts,
            suspended_bytes=suspended_bytes,
            progress=progress,
        )

    @property
    def trained_context_tokens(self) -> int:
        """The longest context the model was trained for."""
        return self.spec.context_tokens

    @property
    def notice(self) -> str:
        """What a user should know of the model before the first answer; "" for nothing."""
        return "\n".join(filter(None, (self.model.files.notice(), self._device_notice)))

    @functools.cached_property
    def text(self) -> TextModel:
        """Tokenizer and chat template. Raises TextUnavailable when the model has none."""
        try:
            return self.model.files.text()
        except ImportError as error:  # measurements run on machines without tokenizers
            raise TextUnavailable(
                f"the library {error.name or error} is not installed", "text needs it"
            ) from None

    @functools.cached_property
    def text_or_none(self) -> TextModel | None:
        """``text``, or None when the model has none."""
        try:
            return self.text
        except TextUnavailable:
            return None

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of the model's config and those of its text side."""
        text = self.text_or_none
        return tuple(dict.fromkeys((*self.spec.end_ids, *(text.end_ids if text else ()))))

    def default_sampling(self) -> SamplingParams:
        """The vendor's defaults, neutral where the model's files say nothing.

        Raises CheckpointDamaged.
        """
        return SamplingParams(**self.model.files.vendor_defaults())

    def session(self, snapshot: KVSnapshot | None = None) -> Session:
        """A new talk: empty, or one that goes on, bit for bit, where ``snapshot`` was taken.

        Raises PacketRefused for a snapshot that is damaged or of another model or compute type,
        PromptTooLong for one beyond this engine's context.
        """
        self.check_open()
        if snapshot is not None:
            snapshot.check(self.fingerprint, self.spec, self.compute)
            if len(snapshot.ids) > self.context_tokens:
                raise PromptTooLong(
                    f"the snapshot has {len(snapshot.ids)} tokens; "
                    f"the limit is {self.context_tokens}"
                )
        session = Session(self, next(self._numbers))
        if snapshot is not None:
            try:
                session.restore(snapshot)
            except BaseException:
                session.close()
                raise
        self._sessions.add(session)
        return session

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells this model from others: of its dimensions, and of samples of its weights."""
        return model_fingerprint(self.spec, self.model.files.weight_files)

    def sessions_that_fit(self) -> int | None:
        """Sessions whose KV caches fit the free memory at the full context; None: unknown."""
        return admission.sessions_that_fit(self.session_bytes, free_memory_bytes())

    def admit(self, num_sessions: int) -> None:
        """Raise DoesNotFit, which says how many do, unless so many new sessions fit."""
        free_bytes = free_memory_bytes()
        admission.admit(num_sessions, self.session_bytes, self.context_tokens, free_bytes)

    @property
    def session_bytes(self) -> int:
        """KV bytes of a session whose context is full."""
        return admission.session_bytes(self.spec, self.compute, self.context_tokens, self.speculate)

    def submit(self, request: ExtendRequest | GenerateRequest) -> Handle:
        """Put a request on its way; what Session.extend and Session.generate wait on."""
        if request.session.engine is not self:
            raise BadParameter("the session belongs to another engine")
        with self._lock:
            return flow.start(self, request)

    def wake(self) -> None:
        """Have both workers look at the cancel flags; from any thread."""
        self.prefill.drop_cancelled()
        self.decode.channel.wake()

    @property
    def closed(self) -> bool:
        """Whether nothing works any more: close() has run, or this is a fork, without threads."""
        return not self._shut_down.alive or os.getpid() != self._process

    def check_open(self) -> None:
        """Raise EngineClosed when nothing works any more."""
        if os.getpid() != self._process:
            raise EngineClosed(
                "the engine is of another process",
                "its threads stayed there when this one was forked",
                "Open the model here",
            )
        if self.closed:
            raise EngineClosed("the engine is closed")

    def close(self) -> None:
        """Cancel everything, end the threads, unmap the weights. Safe to call twice."""
        with self._lock:
            self._shut_down()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _shut_down(
    sessions: weakref.WeakSet[Session],
    prefill: PrefillWorker,
    decode: DecodeWorker,
    gpus: Gpus,
    residency: Residency | None,
    files: ModelFiles,
) -> None:
    for session in list(sessions):
        session.cancel()
    prefill.close()
    decode.close()
    gpus.close()
    if residency is not None:
        residency.native.release()
    files.close()
