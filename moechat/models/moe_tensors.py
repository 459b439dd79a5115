"""The tensors of a layer with routed experts, one module an expert."""

from __future__ import annotations

from moechat.models.decoder_tensors import matrix, mlp, vector
from moechat.models.spec import ModelSpec, TensorSpec

_MODULES = ("gate_proj", "up_proj", "down_proj")


def expert_tensors(
    spec: ModelSpec,
    role: str,
    name: str,
    *,
    module: str = "mlp.",
    expert_modules: tuple[str, str, str] = _MODULES,
    shared: str = "",
    gated: bool = False,
    correction: bool = False,
) -> list[TensorSpec]:
    """Router, experts, and the shared expert if ``shared`` names its module.

    ``expert_modules`` name gate, up and down. ``gated``: a sigmoid gate weighs the shared expert.
    ``correction``: DeepSeek-V3's bias of the choice.
    """
    moe = spec.moe
    assert moe is not None
    name += module
    hidden = spec.hidden_size
    table = [matrix(role + "router", name + "gate.weight", moe.num_experts, hidden)]
    if correction:
        correction_name = name + "gate.e_score_correction_bias"
        table.append(vector(role + "router_correction", correction_name, moe.num_experts))
    if shared:
        size = moe.shared_intermediate_size
        table += mlp(role + "shared.", f"{name}{shared}.", hidden, size)
    if gated:
        table.append(matrix(role + "shared_gate", f"{name}{shared}_gate.weight", 1, hidden))
    for expert in range(moe.num_experts):
        table += mlp(
            f"{role}experts.{expert}.",
            f"{name}experts.{expert}.",
            hidden,
            moe.intermediate_size,
            modules=expert_modules,
        )
    return table
