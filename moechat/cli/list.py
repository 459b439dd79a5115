"""``moechat list``: the models that have a name."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer

from moechat.cli import options
from moechat.sizes import size_text


def list_models(as_json: options.AsJson = False, debug: options.Debug = False) -> int:
    """List the models that have a name, and which are here.

    \b
      moechat list
      moechat list --json | jq -r '.models[] | select(.present) | .name'
    """
    from moechat.cli.parameters import parameters_of, parameters_text
    from moechat.registry import load_registry
    from moechat.terminal.neutralise import one_line
    from moechat.terminal.table import columns_of, table_lines

    registry = load_registry()
    rows: list[dict[str, Any]] = []
    for name, entry in registry.entries.items():
        folder = registry.local_folder(name)
        present = folder is not None and os.path.exists(folder)
        row = {
            "name": name,
            "architecture": entry.get("architecture"),
            **parameters_of(name, entry, folder if present else None),
            "size_bytes": entry.get("size_bytes"),
            "present": present,
            "folder": None if folder is None else str(folder),
            "context_tokens": _table(entry, "limits").get("context_tokens"),
            "license": entry.get("license"),
        }
        # What models.toml leaves out is left out here, too.
        rows.append({key: value for key, value in row.items() if value is not None})
    if as_json:
        typer.echo(json.dumps({"models": rows}, indent=2))
        return 0
    table = [("NAME", "PARAMETERS", "SIZE", "HERE", "CONTEXT", "LICENSE")]
    for row in rows:
        table.append(
            (
                one_line(row["name"]),
                parameters_text(row),
                format_bytes(row.get("size_bytes")),
                "yes" if row["present"] else "no",
                one_line(str(row.get("context_tokens", "-"))),
                one_line(str(row.get("license", "-"))),
            )
        )
    for line in table_lines(table, columns_of(sys.stdout)):
        typer.echo(line)
    return 0


def format_bytes(size_bytes: Any) -> str:
    """A size for people; "-" for what is no size."""
    if type(size_bytes) is not int or size_bytes < 0:
        return "-"
    return size_text(size_bytes)


def _table(entry: dict[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}
