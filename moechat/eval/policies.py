"""The KV policies that are compared, and what an engine is opened with for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Name: whether it has a budget. In the order in which they are measured and shown.
POLICIES = {
    "native": False,
    "fp16": False,
    "int8": False,
    "int4": False,
    "k8v4": False,
    "spectrum": True,
    "spectrum2": True,
    "pdtrim": True,
    "snapkv": True,
}
TWO_TIERS = "spectrum2"  # spectrum without its lowest tier


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with the budget it gets: bytes sent, as a share of 2 bytes an element."""

    name: str
    budget: float | None = None  # None: one that takes what it takes

    @property
    def label(self) -> str:
        """For people: the name, and the budget if there is one."""
        return self.name if self.budget is None else f"{self.name} {self.budget:g}"

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of Engine.open."""
        settings: dict[str, Any] = {"kv": self.name}
        if self.budget is not None:
            settings["kv_budget"] = self.budget
        if self.name == TWO_TIERS:
            settings |= {"kv": "spectrum", "kv_tiers": 2}
        return settings


def policies_of(names: Sequence[str], budgets: Sequence[float]) -> list[Policy]:
    """Each name as often as it has budgets; native first, as the others are compared with it."""
    ordered = [name for name in POLICIES if name == "native" or name in names]
    return [
        Policy(name, budget)
        for name in ordered
        for budget in (budgets if POLICIES[name] else (None,))
    ]
