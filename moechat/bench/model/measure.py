"""The measurement: an open model at growing lengths, decode in turns with plain reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moechat.bench.bursts import Burst, Work, run_rounds
from moechat.bench.machine import available_memory_bytes, machine_facts, thread_notes
from moechat.bench.model.probes import DecodeProbe, PrefillProbe, growing
from moechat.bench.model.report import bytes_facts, decode_row, prefill_row, sampling_rows
from moechat.bench.model.weight_bytes import of_files
from moechat.bench.phases import device_phase_rows, phase_rows
from moechat.bench.reading import Reader, populate
from moechat.bench.settings import ModelSettings
from moechat.bench.status_line import Show
from moechat.engine.engine import Engine
from moechat.errors import ModelNotFound
from moechat.registry import load_registry
from moechat.weights.mapped import map_files

_FIRST_PROMPT, _FIRST_CONTEXT = 128, 1024
_READ_SECONDS = 0.15  # of a burst of reading
# A length is left out when the one before it makes it likely that its round takes longer than this.
_MAX_PROMPT_SECONDS = 20.0

Rows = list[dict[str, Any]]


def measure_model(source: str, settings: ModelSettings, show: Show) -> dict[str, Any]:
    """A registry name, a folder or a GGUF file; the report. Raises as Engine.open does."""
    show(f"opening {source}")
    with _open(source, settings) as engine:
        files = engine.model.files
        num_bytes = of_files(files.path)
        turns = Turns([engine], files.weight_files, [num_bytes.total], settings, show)
        return {
            **turns.frame(engine.name),
            "synthetic": False,
            "prefill_device": gpu.name if (gpu := engine.prefill_choice.gpu) else "cpu",
            "bytes": bytes_facts(num_bytes),
            "prefill": [prefill_row(n, works[0], rows) for n, works, rows in turns.prefill()],
            "decode": [decode_row(n, bursts[0], rows) for n, bursts, rows in turns.decode()],
            "sampling": sampling_rows(engine.spec.vocab_size),
        }


def _open(source: str, settings: ModelSettings) -> Engine:
    try:
        return Engine.open(
            source, threads=settings.threads, device=settings.device, gpu_prefill_tokens=0
        )
    except ModelNotFound as error:
        entry = load_registry().entries.get(source, {})
        if "geometry" not in entry or "config" not in entry:
            raise
        without = f"`moechat bench --synthetic {source}` needs no weights"
        step = f"{error.next_step}; {without}" if error.next_step else without
        raise ModelNotFound(error.what, error.why, step) from None


class Turns:
    """Open models side by side, one or more, that take turns at growing lengths.

    ``files`` are what all of them map: their page tables are filled, and plain reading reads them.
    ``token_bytes``: weight bytes of a decoded token, by model. Phases are the last model's.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        files: Iterable[Path],
        token_bytes: Sequence[int],
        settings: ModelSettings,
        show: Show,
    ) -> None:
        self._engines, self._token_bytes = engines, token_bytes
        self._repetitions, self._show = settings.repetitions, show
        limit = engines[-1].context_tokens
        self._longest = min(settings.max_context, limit)
        self._notes = []
        if settings.max_context > limit:
            self._notes.append(
                f"--max-context {settings.max_context:,} is more than the model's {limit:,} tokens"
                f": measured up to {limit:,}"
            )
        self._notes += thread_notes([engines[-1].threads])
        files = list(files)
        pools = {engines[0].threads: engines[0].pool}
        self._reader = Reader([content for _, content in map_files(files)], pools, _READ_SECONDS)
        show("reading the weights")
        self._pages_mapped = populate(files, available_memory_bytes())

    def frame(self, name: str) -> dict[str, Any]:
        """What a report begins with; ``notes`` may grow until all is measured."""
        engine = self._engines[-1]
        return {
            "benchmark": "model",
            "model": name,
            "threads": engine.threads,
            "instruction_set": engine.instruction_set,
            "compute": engine.compute,
            "repetitions": self._repetitions,
            "notes": self._notes,
            "pages_mapped_before": self._pages_mapped,
            **machine_facts(),
        }

    def decode(self) -> Iterator[tuple[int, list[list[Burst]], Rows]]:
        """Of each context: tokens in it, every model's bursts, phases of a token."""
        last = self._engines[-1]
        for context in (0, *growing(_FIRST_CONTEXT, self._longest - 1)):
            if context + 1 >= last.context_tokens:
                continue
            self._show(f"decode at {context:,} tokens")
            probes = [
                DecodeProbe(engine, context, num_bytes)
                for engine, num_bytes in zip(self._engines, self._token_bytes, strict=True)
            ]
            bursts: list[list[Burst]] = [[] for _ in probes]
            for index, burst in run_rounds(probes, self._reader.read, self._repetitions):
                bursts[index].append(burst)
            yield context, bursts, phase_rows(probes[-1].burst, last.pool, "token")
            for probe in probes:
                probe.close()

    def prefill(
        self, engines: Sequence[Engine] | None = None
    ) -> Iterator[tuple[int, list[list[Work]], Rows]]:
        """Of each length: tokens of the prompt, every model's work, phases of a prompt.

        ``engines``: some of the models, in order, instead of all.
        """
        engines = engines or self._engines
        for tokens in growing(_FIRST_PROMPT, self._longest):
            self._show(f"prefill of {tokens:,} tokens")
            probes = [PrefillProbe(engine, tokens) for engine in engines]
            warm = [probe.burst() for probe in probes]
            rounds = [[probe.burst() for probe in probes] for _ in range(self._repetitions)]
            phases = phase_rows(probes[-1].burst, engines[-1].pool, "prompt", "prefill")
            if engines[-1].prefill_choice.gpu is not None:
                phases = device_phase_rows(probes[-1].stats, "prompt")
            yield tokens, [list(works) for works in zip(*rounds, strict=True)], phases
            # Four times the tokens take four to sixteen times as long: attention grows faster.
            fastest = min(sum(work.seconds for work in works) for works in (warm, *rounds))
            if 4 * fastest > _MAX_PROMPT_SECONDS:
                if 4 * tokens <= self._longest:
                    self._notes.append(
                        f"prompts end at {tokens:,} tokens: a round of longer ones would take more "
                        f"than about {_MAX_PROMPT_SECONDS:g} s"
                    )
                break
