"""``bench model``: a whole model's prefill and decode, beside plain reading of its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moechat.bench.model_bytes import of_files
from moechat.bench.model_machine import machine_facts
from moechat.bench.model_measure import (
    REFERENCE_VOCAB,
    DecodeProbe,
    growing,
    prefill_seconds,
    sampling_seconds,
)
from moechat.bench.model_pages import populate
from moechat.bench.model_reading import PlainReading
from moechat.bench.model_report import bytes_facts, decode_row, prefill_row, sampling_row
from moechat.bench.synthetic_folder import free_ram_bytes
from moechat.engine.engine import Engine
from moechat.errors import Usage

FIRST_PROMPT, FIRST_CONTEXT = 128, 1024
DEFAULT_MAX_CONTEXT, DEFAULT_REPETITIONS = 4096, 5
# A length is left out when the one before it makes one prompt likely to take longer than this.
_MAX_PROMPT_SECONDS = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What to measure. ``max_context`` bounds prompts and contexts."""

    threads: int | None = None
    repetitions: int = DEFAULT_REPETITIONS
    max_context: int = DEFAULT_MAX_CONTEXT

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--threads", self.threads, 1),
            ("--repetitions", self.repetitions, 1),
            ("--max-context", self.max_context, 1),
        ):
            if value is not None and value < least:
                raise Usage(f"{name} {value} is not possible", f"allowed: {least} or more")


def measure_model(source: str, settings: ModelSettings, say: Say) -> dict[str, Any]:
    """A registry name, a folder or a GGUF file; the report. Raises as Engine.open does."""
    say(f"opening {source}")
    with Engine.open(source, threads=settings.threads) as engine:
        path = engine.model.files.path
        num_bytes = of_files(path)
        files = engine.model.files.weight_files
        reading = PlainReading(files, engine.threads)
        say("reading the weights")
        mapped = populate(files, free_ram_bytes())
        try:
            longest = min(settings.max_context, engine.context_tokens)
            prefill = _prefill_rows(engine, longest, settings.repetitions, say)
            decode = []
            for context in (0, *growing(FIRST_CONTEXT, longest - 1)):
                if context + 1 < engine.context_tokens:
                    say(f"decode at {context:,} tokens")
                    probe = DecodeProbe(engine, context)
                    seconds, reads = _between_reads(probe, reading, settings.repetitions)
                    decode.append(decode_row(context, probe.tokens, seconds, reads, num_bytes))
                    probe.close()
        finally:
            reading.close()
        return {
            "bench": "model",
            "model": engine.name,
            "synthetic": False,
            "threads": engine.threads,
            "instruction_set": engine.instruction_set,
            "compute": engine.compute,
            "pages_mapped_before": mapped,
            "bytes": bytes_facts(num_bytes),
            "prefill": prefill,
            "decode": decode,
            "sampling": sampling_rows(engine.spec.vocab_size),
            **machine_facts(),
        }


def _prefill_rows(engine: Engine, longest: int, repetitions: int, say: Say) -> list[dict[str, Any]]:
    rows = []
    for tokens in growing(FIRST_PROMPT, longest):
        say(f"prefill of {tokens:,} tokens")
        warm = prefill_seconds(engine, tokens)
        seconds = [prefill_seconds(engine, tokens, 1 + seed) for seed in range(repetitions)]
        rows.append(prefill_row(tokens, seconds))
        # Four times the tokens take four to sixteen times as long: attention grows faster.
        if 4 * min(warm, *seconds) > _MAX_PROMPT_SECONDS:
            break
    return rows


def _between_reads(
    probe: DecodeProbe, reading: PlainReading, repetitions: int
) -> tuple[list[float], list[float]]:
    """Seconds a token of each burst, and the mean of the readings before and after it."""
    seconds, reads = [], []
    before = reading.burst()
    for _ in range(repetitions):
        seconds.append(probe.seconds_per_token())
        after = reading.burst()
        reads.append((before + after) / 2)
        before = after
    return seconds, reads


def sampling_rows(vocab: int) -> list[dict[str, Any]]:
    """At the model's vocabulary, and at DeepSeek-V3's."""
    sizes = dict.fromkeys((vocab, REFERENCE_VOCAB))
    return [sampling_row(size, sampling_seconds(size)) for size in sizes]
