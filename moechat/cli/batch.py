"""``moechat batch``: a file of prompts, as ``run --batch`` answers them."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from typing import BinaryIO

from moechat.cli import device_options, options
from moechat.cli.answer_lines import Lines
from moechat.cli.prompt_text import FileMissing
from moechat.cli.run import shared_options, start
from moechat.errors import Usage


def batch(
    file: options.BatchFile,
    model: options.ModelOption = "mini",
    concurrency: options.Concurrency = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    max_tokens: options.MaxTokens = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    think: options.Think = None,
    reasoning_effort: options.ReasoningEffort = None,
    ctx: options.ContextTokens = None,
    threads: options.Threads = None,
    resident: options.Resident = False,
    device: device_options.Device = "auto",
    gpu_memory: device_options.GpuMemory = None,
    gpu_prefill_tokens: device_options.GpuPrefillTokens = None,
    gpu_decode: device_options.GpuDecode = "auto",
    gpu_experts: device_options.GpuExperts = None,
    compute: options.Compute = "bf16",
    kv: options.KV = "native",
    kv_budget: options.KVBudget = None,
    speculate: options.Speculate = False,
    stats: options.Stats = None,
    debug: options.Debug = False,
) -> int:
    """Answer every line of a file.

    Each line is answered on its own, as one JSON object, several at once. The lines and the objects
    are those of `moechat run --batch` (see its help), in the order of the lines, and an answer does
    not depend on how many are made at once.

    \b
      moechat batch questions.jsonl > answers.jsonl
      moechat batch questions.jsonl --model mini --temperature 0 --concurrency 8
      tail -n +100 questions.jsonl | moechat batch -
    """
    given = locals()
    rest = f"{'FILE' if file == '-' else shlex.quote(file)} | moechat batch - …"
    with _opened(file) as source:
        return start(
            **shared_options(given),
            prompt=None,
            lines=Lines(source, concurrency, rest),
            chat=None,
        )


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            raise Usage("- stands for stdin, which is a terminal", "", "Name a file")
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise FileMissing(f"{file[:200]!a} cannot be read", error.strerror or str(error)) from None
    with stream:
        yield stream
