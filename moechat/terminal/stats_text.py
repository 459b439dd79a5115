"""The words and numbers that follow an answer."""

from __future__ import annotations

import json

from moechat.events import Finished, TurnStats
from moechat.sizes import size_text

_SHOWN_QUEUED_SECONDS = 0.05


def stats_rows(finished: Finished) -> list[tuple[str, str]]:
    """The counters of an answer for a person: what is counted, and the figures."""
    stats = finished.stats
    # Cancelled while the prompt was read: no token came, at no rate.
    began = stats.decode_tokens > 0 or finished.finish_reason != "cancelled"
    prompt = _prompt_text(stats, began)
    answer = f"{stats.decode_tokens} tokens"
    if stats.reasoning_tokens:
        answer += f" ({stats.reasoning_tokens} of thinking)"
    if began:
        answer += f", {stats.decode_tokens_per_second:.1f} tok/s"
        answer += f" on {stats.decode_device}" if stats.decode_device else ""
    if stats.drafted:
        answer += f", {stats.accepted} of {stats.drafted} drafts accepted"
    if stats.gpu_experts:
        answer += f", {stats.gpu_experts} experts a layer on the GPU"
    complete = stats.prefill_is_complete
    if stats.kv_bytes < stats.kv_native_bytes and complete:
        share = 100 * stats.kv_bytes / stats.kv_native_bytes
        sent, native = size_text(stats.kv_bytes), size_text(stats.kv_native_bytes)
        prompt += f", KV {sent} of {native} ({share:.0f} %)"
    if stats.kv_dropped_fraction and complete:
        prompt += f", {percent(stats.kv_dropped_fraction)} of the tokens dropped"
    if stats.kv_native_layers:
        prompt += f", {stats.kv_native_layers} layers natively (values too large for their tier)"
    if stats.queued_seconds >= _SHOWN_QUEUED_SECONDS:
        prompt += f", after {stats.queued_seconds:.1f} s behind others"
    first = [("first token", f"{stats.first_token_seconds:.2f} s")] if began else []
    return [
        ("prompt", prompt),
        *first,
        ("answer", answer),
        ("seed", str(stats.seed)),
        ("end", finished.finish_reason),
    ]


def _prompt_text(stats: TurnStats, began: bool) -> str:
    """What was read of the prompt, at which rate, and where; ``began``: the answer did."""
    text = f"{stats.new_prompt_tokens} new + {stats.cached_prompt_tokens} cached tokens"
    layers = f"layer {{}} of {stats.prefill_layers}"
    # Of a prompt that was read in part there is no rate.
    if not stats.prefill_is_complete:
        if stats.prefill_resumed_layers:
            text += f", resumed at {layers.format(stats.prefill_resumed_layers)}"
        text += f", interrupted at {layers.format(stats.prefill_layers_done)}"
        text += f" after {stats.prefill_seconds:.1f} s"
    elif stats.prefill_resumed_layers:
        text += f", resumed at {layers.format(stats.prefill_resumed_layers)}"
        text += f", {stats.prefill_seconds:.1f} s"
    elif stats.prefill_seconds:  # a single new token is the decode worker's
        text += f", {stats.prefill_tokens_per_second:.0f} tok/s"
    elif not began and stats.new_prompt_tokens > 1:
        text += ", none of them read"
    return text + _device_text(stats)


def _device_text(stats: TurnStats) -> str:
    """Which device read the prompt, and what that took where weights crossed to it."""
    if not stats.prefill_device:
        return ""
    text = f" on {stats.prefill_device}"
    if stats.prefill_stream_seconds:
        rate = stats.prefill_streamed_bytes / stats.prefill_stream_seconds
        text += f" ({size_text(stats.prefill_streamed_bytes)} at {size_text(rate)}/s, "
        text += f"{stats.prefill_compute_seconds:.1f} s of computing, "
        text += f"{stats.prefill_wait_seconds:.1f} s of waiting"
        text += f", {stats.prefill_attention} attention)" if stats.prefill_attention else ")"
    return text


def stats_line(finished: Finished) -> str:
    """The same on one line."""
    *named, (_, reason) = stats_rows(finished)
    return "; ".join([*(f"{name} {figures}" for name, figures in named), reason])


def stats_json(finished: Finished, index: int | None = None) -> str:
    """The counters of an answer as one JSON object on one line; ``index``: which of a batch."""
    stats = finished.stats
    return json.dumps(
        ({} if index is None else {"index": index})
        | {
            "new_prompt_tokens": stats.new_prompt_tokens,
            "cached_prompt_tokens": stats.cached_prompt_tokens,
            "prefill_seconds": round(stats.prefill_seconds, 6),
            "prefill_tokens_per_second": round(stats.prefill_tokens_per_second, 2),
            "prefill_device": stats.prefill_device,
            "prefill_streamed_bytes": stats.prefill_streamed_bytes,
            "prefill_stream_seconds": round(stats.prefill_stream_seconds, 6),
            "prefill_compute_seconds": round(stats.prefill_compute_seconds, 6),
            "prefill_wait_seconds": round(stats.prefill_wait_seconds, 6),
            "prefill_attention": stats.prefill_attention,
            "prefill_resumed_layers": stats.prefill_resumed_layers,
            "prefill_layers": stats.prefill_layers,
            "prefill_layers_done": stats.prefill_layers_done,
            "queued_seconds": round(stats.queued_seconds, 6),
            "first_token_seconds": round(stats.first_token_seconds, 6),
            "decode_device": stats.decode_device,
            "decode_tokens": stats.decode_tokens,
            "reasoning_tokens": stats.reasoning_tokens,
            "decode_seconds": round(stats.decode_seconds, 6),
            "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "gpu_experts": stats.gpu_experts,
            "kv_bytes": stats.kv_bytes,
            "kv_native_bytes": stats.kv_native_bytes,
            "kv_dropped_fraction": round(stats.kv_dropped_fraction, 6),
            "kv_native_layers": stats.kv_native_layers,
            "kv_encode_seconds": round(stats.kv_encode_seconds, 6),
            "kv_decode_seconds": round(stats.kv_decode_seconds, 6),
            "seed": stats.seed,
            "finish_reason": finished.finish_reason,
        }
    )


def kv_note(finished: Finished, budget: float | None, *, counted: bool = False) -> str:
    """What the KV path lost of a prompt, or sent beyond the ``budget`` asked for; or "".

    ``counted``: stats_line, which counts the loss, is shown as well.
    """
    stats = finished.stats
    if not stats.prefill_is_complete:
        return ""
    notes = []
    if stats.kv_dropped_fraction and not counted:
        notes.append(f"{percent(stats.kv_dropped_fraction)} of the prompt's tokens were dropped")
    if budget is not None and stats.kv_bytes > budget * stats.kv_native_bytes:
        share = stats.kv_bytes / stats.kv_native_bytes
        notes.append(f"--kv-budget {budget:g} was too little: {share:.2g} was sent")
    return "; ".join(notes)


def percent(fraction: float) -> str:
    """A share for a person."""
    return f"{100 * fraction:.1f} %"


def cut_note(finished: Finished, context_tokens: int, has_text: bool = True) -> str:
    """Why the answer is incomplete; empty when it is complete.

    Without ``has_text`` there may have been thinking, but no answer.
    """
    thought = not has_text and finished.stats.reasoning_tokens > 0
    while_thinking = " while the model was thinking" if thought else ""
    if finished.finish_reason == "length":
        limit = f"cut at {finished.stats.decode_tokens} tokens by the max_tokens limit"
        return limit + while_thinking
    if finished.finish_reason == "context":
        return f"cut{while_thinking}: the context of {context_tokens} tokens is full"
    if finished.finish_reason == "cancelled":
        return "interrupted" + while_thinking
    return "the model thought and gave no answer" if thought else ""
