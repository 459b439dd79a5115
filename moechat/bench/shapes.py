"""The dimensions of a model's experts, from models.toml: no weights are needed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from moechat.errors import ModelNotFound, Usage
from moechat.registry import load_registry


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One routed expert: gate and up [inner, hidden], down [hidden, inner]."""

    name: str
    hidden: int
    inner: int
    experts_per_token: int


def expert_shape(name: str) -> ExpertShape:
    """The experts of a registry entry. Raises ModelNotFound, or Usage when it has none."""
    entries = load_registry().entries
    if name not in entries:
        close = difflib.get_close_matches(name[:60].lower(), entries, n=3)
        known = f"known names: {', '.join(entries)}"
        raise ModelNotFound(
            f"no model is called {name[:60]!a}",
            f"did you mean {' or '.join(close)}? {known}" if close else known,
            "`moechat list` shows them",
        )
    facts = entries[name].get("geometry")
    if not isinstance(facts, dict):
        raise Usage(f"the shape of {name} is not known", "models.toml has no geometry for it")
    if not facts.get("num_experts"):
        raise Usage(
            f"{name} has no experts",
            "its layers are dense, and this measures the experts of a mixture",
            f"With experts: {', '.join(_with_experts(entries))}",
        )
    keys = ("hidden_size", "moe_intermediate_size", "num_experts_per_token")
    values = [facts.get(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise Usage(f"the shape of {name} is not usable", f"{key} in its geometry is {value!a}")
    hidden, inner, per_token = (int(value) for value in values)  # type: ignore[arg-type]
    return ExpertShape(name, hidden, inner, per_token)


def _with_experts(entries: dict[str, dict[str, Any]]) -> list[str]:
    tables = {name: entry.get("geometry") for name, entry in entries.items()}
    return [
        n for n, facts in tables.items() if isinstance(facts, dict) and facts.get("num_experts")
    ]
