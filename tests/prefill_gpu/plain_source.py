"""All weights of an oracle folder as tensors on one device, decoded naively: no streaming."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import numpy as np
import torch
from oracle_variants import float_tensors
from oracles import ORACLES

from moechat.models.architectures import load_spec, tensor_table
from moechat.models.spec import ModelSpec
from moechat.prefill.gpu.source import ExpertGroup

FLOAT_ROLES = ("router", "shared_gate", "embedding")


@functools.cache
def values_by_role(name: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """float32 values of every role of tests/fixtures/oracle/<name>, [outputs, inputs]."""
    spec = load_spec(ORACLES / name)
    config = json.loads((ORACLES / name / "config.json").read_text())
    stored, roles = float_tensors(name), {}
    for entry in tensor_table(spec, config):
        values = stored[entry.name].array + np.float32(entry.added)
        assert values.shape == entry.shape
        if entry.transposed:
            values = values.swapaxes(-1, -2)
        parts = {entry.role: values}
        if entry.interleaved:
            axis = 1  # the outputs, behind the experts
            halves = [values.take(range(i, values.shape[axis], 2), axis) for i in (0, 1)]
            parts = {
                entry.role.replace("gate_up", half): part
                for half, part in zip(("gate", "up"), halves)
            }
        for role, part in parts.items():
            if entry.stacked:
                roles |= {role.replace("*", str(e)): part[e] for e in range(len(part))}
            else:
                roles[role] = part
    return spec, roles


class PlainSource:
    """LayerSource of an oracle folder, ``group`` experts at a time; notes what is asked of it."""

    def __init__(
        self, name: str, compute: str, *, group: int = 3, device: str | torch.device = "cpu"
    ) -> None:
        self.spec, self._roles = values_by_role(name)
        self.device = torch.device(device)
        self.dtype = {"exact": torch.float32, "bf16": torch.bfloat16}[compute]
        self.group = group
        self.log: list[str] = []

    def _tensor(self, role: str, dtype: torch.dtype) -> torch.Tensor | None:
        values = self._roles.get(role)
        if values is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

    def vector(self, role: str) -> torch.Tensor | None:
        return self._tensor(role, torch.float32)

    def matrix(self, role: str) -> torch.Tensor | None:
        wide = role.rsplit(".", 1)[-1] in FLOAT_ROLES
        return self._tensor(role, torch.float32 if wide else self.dtype)

    def expert_groups(self, layer: int) -> Iterator[ExpertGroup]:
        count = self.spec.moe.num_experts
        for first in range(0, count, self.group):
            experts = range(first, min(first + self.group, count))
            self.log.append(f"experts {layer} {first}")
            parts = {}
            for part in ("gate", "up", "down"):
                role = f"layers.{layer}.experts.{{}}.{part}"
                parts[part] = torch.stack([self.matrix(role.format(e)) for e in experts])
                if role.format(0) + "_bias" in self._roles:
                    biases = [self.vector(role.format(e) + "_bias") for e in experts]
                    parts[part + "_bias"] = torch.stack(biases)
            yield ExpertGroup(first=first, **parts)
            for tensor in parts.values():  # a group that is read after its time is seen
                tensor.fill_(torch.nan)

    def begin(self, layer: int) -> None:
        self.log.append(f"begin {layer}")

    def release(self, layer: int) -> None:
        self.log.append(f"release {layer}")
