"""``moechat show``: what is known of one model, read from its small files only."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moechat.cli import options
from moechat.cli.list import format_bytes

if TYPE_CHECKING:
    from moechat.engine.model_files import ModelFiles

# What is there of these comes in this order, then the rest.
_ORDER = (
    "name",
    "architecture",
    "parameters",
    "active_parameters",
    "size_bytes",
    "context_tokens",
    "license",
    "source",
    "present",
    "folder",
    "precision",
    "format_bytes",
    "geometry",
    "kv_bytes_per_token",
    "kv_probe",
    "defaults",
    "chat_template",
    "instruction_set",
    "files",
)
_ENTRY_KEYS = ("architecture", "license", "source", "precision", "size_bytes")


def show(
    model: options.RequiredModelArgument,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Show what is known of one model.

    Architecture, geometry, files, context, sampling defaults, memory of the KV cache. A model that
    models.toml describes can be shown without its weights.

    \b
      moechat show mini
      moechat show mini --json | jq .geometry.num_experts
      moechat show /path/to/folder
      moechat show ./model.gguf
    """
    facts = _facts(model)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return 0
    from moechat.terminal.table import columns_of, table_lines

    for line in table_lines(_rows(facts, model), columns_of(sys.stdout)):
        typer.echo(line)
    return 0


def _facts(model: str) -> dict[str, Any]:
    """All that is known, in _ORDER; what is not known is left out. Raises ModelNotFound."""
    from moechat.cli.parameters import parameters_of
    from moechat.engine.loading import choose_instruction_set
    from moechat.registry import load_registry

    registry = load_registry()
    entry = registry.entries.get(model)
    folder = registry.local_folder(model) if entry is not None else None
    facts: dict[str, Any] = {"name": model, "present": False}
    if entry is None or (folder is not None and os.path.exists(folder)):
        resolved = registry.resolve(model)
        facts |= {"name": resolved.name, "present": True, "folder": str(resolved.path)}
        folder = resolved.path
    facts |= {key: entry[key] for key in _ENTRY_KEYS if entry and key in entry}
    if facts["present"] and folder is not None:
        facts |= _facts_of_files(folder)
    elif entry is not None:
        facts |= {key: entry[key] for key in ("geometry", "defaults", "files") if key in entry}
        limits = entry.get("limits")
        if isinstance(limits, dict) and "context_tokens" in limits:
            facts["context_tokens"] = limits["context_tokens"]
    facts |= _kv_bytes(facts.get("geometry"))
    facts |= parameters_of(model, entry, folder if facts["present"] else None)
    facts["instruction_set"] = choose_instruction_set()
    known = [key for key in _ORDER if key in facts]
    return {key: facts[key] for key in [*known, *(key for key in facts if key not in known)]}


def _facts_of_files(path: Path) -> dict[str, Any]:
    """What the model's own files say. Raises as their readers do."""
    from moechat.engine.kv_choice import known_verdict
    from moechat.engine.model_files import find_model_files
    from moechat.models.geometry import geometry

    files = find_model_files(path)
    spec, verdict = files.spec, known_verdict(files)
    return {
        "architecture": files.architecture,
        "context_tokens": spec.context_tokens,
        "geometry": geometry(spec),
        "kv_probe": None if verdict is None else verdict.keys(),
        "defaults": files.vendor_defaults(),
        "chat_template": files.has_chat_template(),
        "files": _files(path) if path.is_dir() else _sizes(files.weight_files),
        "size_bytes": sum(file.stat().st_size for file in files.weight_files),
    } | _formats(files)


def _formats(files: ModelFiles) -> dict[str, dict[str, int]]:
    """Bytes by storage format; nothing where the weights cannot be opened."""
    from moechat.errors import MoechatError

    try:
        tensors = files.bind()
    except MoechatError:
        return {}
    formats: dict[str, int] = {}
    for tensor in tensors:
        parts = (tensor.data, tensor.scale, tensor.zeros, tensor.group_index)
        num_bytes = sum(part.array.nbytes for part in parts if part is not None)
        formats[tensor.format] = formats.get(tensor.format, 0) + num_bytes
    return {"format_bytes": dict(sorted(formats.items(), key=lambda item: -item[1]))}


def _sizes(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [{"name": file.name, "size_bytes": file.stat().st_size} for file in files]


def _files(folder: Path) -> list[dict[str, Any]]:
    return _sizes(sorted(path for path in folder.iterdir() if path.is_file()))


def _kv_bytes(geometry: Any) -> dict[str, dict[str, int]]:
    """KV bytes a token by compute mode."""
    from moechat.models.geometry import kv_elements_per_token

    elements = kv_elements_per_token(geometry) if isinstance(geometry, dict) else None
    if elements is None:
        return {}
    return {"kv_bytes_per_token": {"bf16": 2 * elements, "exact": 4 * elements}}


def _verdict_text(keys: dict[str, Any] | None, model: str) -> str:
    if keys is None:
        return f"not probed: moechat eval probe {shlex.quote(model)}"
    from moechat.kv.verdict import Verdict

    return Verdict(**keys).text


def _rows(facts: dict[str, Any], model: str) -> list[tuple[str, str]]:
    """The facts for people as label and value, sections indented; ``model`` as it was asked for."""
    from moechat.cli.parameters import parameters_text
    from moechat.terminal.neutralise import one_line

    rows: list[tuple[str, str]] = []

    def add(label: str, value: Any = "", indent: str = "") -> None:
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        if isinstance(shown, (list, tuple)):
            shown = ", ".join(map(str, shown)) or "none"
        rows.append((indent + one_line(label), one_line(str(shown))))

    titles = {"defaults": "sampling defaults", "kv_bytes_per_token": "KV bytes a token"}
    for key, value in facts.items():
        label = titles.get(key, key.replace("_", " "))
        if key == "files" and isinstance(value, list):
            add("files")
            for file in value:
                add(format_bytes(file.get("size_bytes")), file.get("name"), "  ")
        elif key == "format_bytes" and isinstance(value, dict):
            add("formats")
            for format_, size_bytes in value.items():
                add(format_, format_bytes(size_bytes), "  ")
        elif key == "kv_probe":
            add("KV probe", _verdict_text(value, model))
        elif key == "parameters":
            add(label, parameters_text(facts))
        elif key == "active_parameters":
            pass  # beside the others
        elif key == "size_bytes":
            add("weights", format_bytes(value))
        elif isinstance(value, dict):
            add(label, "" if value else "none")
            for name, item in value.items():
                add(name, item, "  ")
        else:
            add(label, value)
    return rows
