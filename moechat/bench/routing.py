"""Which experts each call uses: made beforehand, so that a call costs no random draws."""

from __future__ import annotations

import numpy as np

from moechat import _native

_UNIFORM_CALLS = 64


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
