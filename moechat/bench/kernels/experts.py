"""The experts that are measured: their shape, from models.toml, and which of them a call uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moechat import _native
from moechat.bench.settings import model_entry
from moechat.errors import Usage

_UNIFORM_CALLS = 64


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One routed expert: gate and up [inner, hidden], down [hidden, inner]."""

    name: str
    hidden: int
    inner: int
    experts_per_token: int


def expert_shape(name: str) -> ExpertShape:
    """The experts of a registry entry. Raises ModelNotFound, or Usage when it has none."""
    facts = model_entry(name).get("geometry")
    if not isinstance(facts, dict):
        raise Usage(f"the shape of {name} is not known", "models.toml has no geometry for it")
    if not facts.get("num_experts"):
        raise Usage(
            f"{name} has no experts",
            "its layers are dense, and this measures the experts of a mixture",
        )
    keys = ("hidden_size", "moe_intermediate_size", "num_experts_per_token")
    values = [facts.get(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise Usage(f"the shape of {name} is not usable", f"{key} in its geometry is {value!a}")
    hidden, inner, per_token = (int(value) for value in values)  # type: ignore[arg-type]
    return ExpertShape(name, hidden, inner, per_token)


class Routes:
    """Expert ids of call after call, int32 [batch, experts per token].

    ``hit`` "same": all rows use the same experts, and a random order of all experts is walked, so
    that one returns only after all others. "uniform": each row has its own random choice.
    """

    def __init__(self, hit: str, num_experts: int, experts_per_token: int, batch: int) -> None:
        generator = np.random.default_rng(2)
        if hit == "uniform" and batch > 1:
            calls = [
                [generator.permutation(num_experts)[:experts_per_token] for _ in range(batch)]
                for _ in range(_UNIFORM_CALLS)
            ]
            self._ids = [np.array(rows, np.int32) for rows in calls]
        else:
            order = generator.permutation(num_experts).astype(np.int32)
            walk = np.resize(order, np.lcm(num_experts, experts_per_token))
            self._ids = [
                np.ascontiguousarray(np.broadcast_to(ids, (batch, experts_per_token)))
                for ids in walk.reshape(-1, experts_per_token)
            ]
        self._distinct = [len(np.unique(ids)) for ids in self._ids]
        self.weights = np.full((batch, experts_per_token), 1 / experts_per_token, np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    def at(self, call: int) -> tuple[_native.Int32, int]:
        """Ids of a call, and how many distinct experts they name. Calls repeat after ``len``."""
        index = call % len(self._ids)
        return self._ids[index], self._distinct[index]
