"""What a caller sees while the engine works. Front ends map events to streams and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Counters of one answer. Seconds are wall time."""

    new_prompt_tokens: int = 0  # to be prefilled for this answer; see prefill_is_complete
    cached_prompt_tokens: int = 0  # already in the KV cache
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the request to the first sampled token
    decode_tokens: int = 0  # sampled tokens, the end token included
    decode_seconds: float = 0.0
    seed: int = 0  # the seed that was used, also when none was asked for
    reasoning_tokens: int = 0  # of decode_tokens, those of thinking
    drafted: int = 0  # tokens that speculation drafted and a step verified
    accepted: int = 0  # and those of them that were right
    kv_bytes: int = 0  # KV that prefill sent to decode: payload, scales and centres
    kv_native_bytes: int = 0  # the same tokens' KV at 2 bytes an element
    kv_dropped_fraction: float = 0.0  # of the new tokens, averaged over the layers
    kv_native_layers: int = 0  # that crossed natively, for values too large for their tiers
    kv_encode_seconds: float = 0.0  # on the prefill side, beside the next layer's computing
    kv_decode_seconds: float = 0.0  # on the decode side
    queued_seconds: float = 0.0  # before the prefill began, while others' prompts were read
    prefill_device: str = ""  # that read the prompt; "" when nothing was prefilled
    prefill_streamed_bytes: int = 0  # weights that crossed to it
    prefill_stream_seconds: float = 0.0  # their copies, which run beside computing
    # Of the layers, less the waits for weights; these three are known of complete prefills only.
    prefill_compute_seconds: float = 0.0
    prefill_wait_seconds: float = 0.0
    prefill_attention: str = ""  # the kernels that did it on a GPU
    prefill_resumed_layers: int = 0  # that a cancelled prefill of the same prompt had computed
    prefill_layers: int = 0  # that the prompt goes through, of all parts; 0: nothing was prefilled
    prefill_layers_done: int = 0  # of them, those of before included
    gpu_experts: int = 0  # routed experts of a layer that decode's GPU held at the end, on average
    decode_device: str = ""  # that made the steps; "cuda:0, cpu" when the second one went on

    @property
    def prefill_is_complete(self) -> bool:
        """Whether no layer is missing: a prefill that is cut leaves nothing in the cache."""
        return self.prefill_layers_done == self.prefill_layers

    @property
    def prefill_tokens_per_second(self) -> float:
        """New prompt tokens over prefill time; 0 when nothing, or only a part, was prefilled."""
        whole = self.prefill_is_complete and not self.prefill_resumed_layers
        return (
            self.new_prompt_tokens / self.prefill_seconds if self.prefill_seconds and whole else 0.0
        )

    @property
    def decode_tokens_per_second(self) -> float:
        """Sampled tokens over decode time; 0 when nothing was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base: ``token_id`` and ``finish_reason`` are None unless the event carries them."""

    token_id: int | None = None
    finish_reason: FinishReason | None = None
    text: str = ""  # answer text that became certain with this event
    reasoning: str = ""  # and what the model thought before the answer


@dataclass(frozen=True)
class Queued(Event):
    """The request waits for its prefill: prompts are read one after another, first come first."""

    ahead: int  # requests before it, the one whose prompt is being read included


@dataclass(frozen=True)
class PrefillProgress(Event):
    """Prefill advanced by one layer."""

    layers_done: int
    num_layers: int
    tokens: int  # tokens being prefilled
    seconds: float  # since the prefill began
    stream_bytes_per_second: float = 0.0  # of weights, to a GPU
    resumed_layers: int = 0  # that a cancelled prefill of the same prompt had computed, in no time


@dataclass(frozen=True)
class Token(Event):
    """One sampled token. ``text`` never holds half a character or part of a stop string."""

    token_id: int
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Finished(Event):
    """The last event: why the answer ended, the text that was still held back, the counters."""

    finish_reason: FinishReason
    text: str = ""
    stats: TurnStats = field(default_factory=TurnStats)
