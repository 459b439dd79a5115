"""``moechat doctor``: what this machine has for moechat, and what moechat would use of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from moechat.cli import options


def doctor(as_json: options.AsJson = False, debug: options.Debug = False) -> int:
    """Show what this machine has, and what is used of it.

    Processor and memory; GPUs, how fast weights come to them, and whether they would read long
    prompts.

    \b
      moechat doctor
      moechat doctor --json | jq .auto_device
    """
    facts = _facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return 0
    from moechat.terminal.table import columns_of, table_lines

    for line in table_lines(_rows(facts), columns_of(sys.stdout)):
        typer.echo(line)
    return 0


def _facts() -> dict[str, Any]:
    from moechat.bench.machine import machine_facts
    from moechat.engine.gpu_survey import gpu_facts
    from moechat.engine.loading import choose_instruction_set

    return {**machine_facts(), "instruction_set": choose_instruction_set(), **gpu_facts()}


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from moechat.sizes import size_text
    from moechat.terminal.neutralise import one_line

    machine = facts["machine"]
    free, memory = (machine[key] for key in ("available_memory_bytes", "memory_bytes"))
    rows = [
        ("processor", f"{machine['cpu']}, {machine['usable_cpus']} usable"),
        ("instruction set", facts["instruction_set"]),
        ("memory", f"{size_text(free)} of {size_text(memory)} free"),
    ]
    for gpu in facts["gpus"]:
        text = gpu["name"]
        if "device" in gpu:
            free, memory = gpu["free_bytes"], gpu["memory_bytes"]
            text += f", {size_text(free)} of {size_text(memory)} free, compute capability "
            text += gpu["compute_capability"]
            rate = gpu["link_bytes_per_second"]
            text += f", weights at {size_text(rate)}/s" if rate else ", the link was not measured"
        rows.append((f"GPU {gpu['device']}" if "device" in gpu else "GPU", text))
    reader = facts["auto_device"]
    if reader == "cpu":
        rows.append(("prompts", f"read by the CPU: {facts['why_cpu']}"))
    else:
        rows.append(("prompts", f"long ones of large models are read by {reader}"))
    return [(label, one_line(text)) for label, text in rows]
