"""The KV policies that are compared, by the names that they have here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat.errors import Usage

if TYPE_CHECKING:
    from moechat.kv.policy import KVPolicy
    from moechat.models.spec import ModelSpec

# In the order in which they are measured and shown, with the tiers that spectrum may use.
_TIERS = {
    "native": None,
    "fp16": None,
    "int8": None,
    "int4": None,
    "k8v4": None,
    "spectrum": 3,
    "spectrum2": 2,
    "spectrum4": 4,
    "pdtrim": None,
    "snapkv": None,
}
NAMES = tuple(_TIERS)
_WITH_BUDGET = ("spectrum", "spectrum2", "spectrum4", "pdtrim", "snapkv")
_CENTRING = {"": None, "plain": False, "centred": True}  # what may follow a name and a hyphen


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with the budget it gets: bytes sent, as a share of 2 bytes an element.

    ``name``: one of NAMES, or one with -plain or -centred: keys as they are, or less each channel's
    mean, whatever is usual.
    """

    name: str
    budget: float | None = None  # None: one that takes what it takes

    @property
    def label(self) -> str:
        """For people: the name, and the budget if there is one."""
        return self.name if self.budget is None else f"{self.name} {self.budget:g}"

    def make(self, spec: ModelSpec) -> KVPolicy:
        """What an engine takes."""
        from moechat.kv.layout import KVLayout
        from moechat.kv.policy import make_policy

        base, _, centring = self.name.partition("-")
        return make_policy(
            "spectrum" if base.startswith("spectrum") else base,
            1.0 if self.budget is None else self.budget,
            KVLayout.of(spec),
            num_tiers=_TIERS[base] or 3,
            centre_keys=_CENTRING[centring],
        )


def policies_of(names: Sequence[str], budgets: Sequence[float]) -> list[Policy]:
    """Each name as often as it has budgets; native first, as the others are compared with it.

    Raises Usage for a name that is none.
    """
    for name in names:
        base, hyphen, centring = name.partition("-")
        if base not in NAMES or centring not in _CENTRING or bool(hyphen) != bool(centring):
            raise Usage(
                f"--policies cannot be {name[:40]!a}",
                f"it must be a list of {', '.join(NAMES)}; -plain or -centred may follow a name",
            )
    ordered = sorted(dict.fromkeys(["native", *names]), key=lambda n: NAMES.index(_base(n)))
    return [
        Policy(name, budget)
        for name in ordered
        for budget in (budgets if _base(name) in _WITH_BUDGET else (None,))
    ]


def _base(name: str) -> str:
    return name.partition("-")[0]
