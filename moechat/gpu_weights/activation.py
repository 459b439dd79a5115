"""What stands between the two products of an MLP. Shapes: R rows, I width of the MLP."""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.models.spec import ModelSpec


def activate(spec: ModelSpec, gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
    """act(gate) * up, float32; models/spec.py has the formulas."""
    if spec.activation == "silu":
        return torch.nn.functional.silu(gate_RI) * up_RI
    if spec.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate_RI, approximate="tanh") * up_RI
    gate_RI = gate_RI.clamp(max=spec.activation_limit)
    up_RI = up_RI.clamp(-spec.activation_limit, spec.activation_limit)
    return (up_RI + 1) * gate_RI * torch.sigmoid(spec.activation_alpha * gate_RI)
