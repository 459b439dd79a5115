"""One token of each of some sessions through all layers: the CPU has the routed experts.

The same definition as cpp/decode/step.cpp. Shapes: R rows, D hidden, V vocabulary, L layers, W
elements of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.decode.gpu import ops
from moechat.decode.gpu.hot_experts import HotExperts
from moechat.decode.gpu.plain_ops import rms_norm
from moechat.decode.gpu.resident_weights import Linear, ResidentWeights
from moechat.decode.gpu.step_inputs import StepInputs
from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import LatentAttention, MoeSpec


@dataclass(frozen=True)
class StepOutputs:
    """On the device. ``finite_LR``: whether what leaves a layer is, a row."""

    logits_RV: torch.Tensor
    slots_LRW: torch.Tensor
    finite_LR: torch.Tensor


class StepLost(Exception):
    """The step was aborted, or its experts did not come: its rows are as if it had not begun."""


class HybridStep:
    """The operations of a step, one after another on the current stream; nothing waits for them.

    ``mailbox``: None for a model without routed experts.
    """

    def __init__(self, weights: ResidentWeights, mailbox: ops.Mailbox | None) -> None:
        self._weights, self._spec, self._mailbox = weights, weights.spec, mailbox
        self._exact = weights.compute == "exact"
        self.hot: HotExperts | None = None  # to be set before the first step
        self._work = ops.Workspace(weights.device)

    def run(self, inputs: StepInputs, slots_SCW: Sequence[torch.Tensor], rows: int) -> StepOutputs:
        """Of the first ``rows`` rows. New slots are written to ``slots_SCW``, a tensor a layer."""
        spec = self._spec
        x_RD = inputs.x[:rows]
        states, slots = [], []
        for layer in range(spec.num_layers):
            at = ops.Slots(
                slots_SCW[layer],
                inputs.slab[:rows],
                inputs.begin[layer, :rows],
                inputs.own[layer, :rows],
            )
            x_RD, slot_RW = self._attention(layer, x_RD, inputs, at)
            x_RD = self._feed_forward(layer, x_RD)
            if self._lost():
                raise StepLost
            states.append(x_RD)
            slots.append(slot_RW)
        logits_RV = ops.linear(
            x_RD,
            self._weights.head(),
            work=self._work,
            norm=self._norm("final_norm"),
            exact=self._exact,
        )
        if spec.final_softcap > 0:
            logits_RV = torch.tanh(logits_RV / spec.final_softcap) * spec.final_softcap
        return StepOutputs(logits_RV, torch.stack(slots), torch.stack(states).isfinite().all(-1))

    def _lost(self) -> bool:
        """Whether the experts will not come; a GPU goes on without them, nothing waits for it."""
        mailbox = self._mailbox
        return mailbox is not None and not mailbox.error.is_cuda and int(mailbox.error) != 0

    def _attention(
        self, layer: int, x_RD: torch.Tensor, inputs: StepInputs, at: ops.Slots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream [R, D], new slots [R, W])."""
        role, number = f"layers.{layer}.", self._spec.layers[layer].rope
        cos_RP, sin_RP = (part[: len(x_RD)] for part in inputs.angles[number])
        turn = (cos_RP, sin_RP, self._spec.ropes[number].interleaved)
        norm = self._norm(role + "attention_norm")
        if isinstance(self._spec.attention, LatentAttention):
            values, slot_RW = self._latent(role, x_RD, norm, turn, at)
        else:
            values, slot_RW = self._grouped(role, x_RD, norm, turn, at)
        o = self._linear(role + "o")
        post = self._weights.vector(role + "post_attention_norm")
        if post is None:
            return self._product(values, o, add=x_RD), slot_RW
        branch_RD = rms_norm(self._product(values, o), post, self._spec.rms_norm_eps)
        return x_RD + branch_RD, slot_RW

    def _latent(
        self,
        role: str,
        x_RD: torch.Tensor,
        norm: ops.Norm,
        turn: tuple[torch.Tensor, torch.Tensor, bool],
        at: ops.Slots,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self._spec.attention
        assert isinstance(sizes, LatentAttention)
        first = role + ("q_a" if sizes.q_lora_rank else "q")
        query, kv_RW = self._products(x_RD, (first, role + "kv_a"), norm)
        if sizes.q_lora_rank:
            own_norm = ops.Norm(self._vector(role + "q_a_norm"), sizes.norm_eps)
            query = self._product(query, self._linear(role + "q_b"), norm=own_norm)
        return ops.latent_attention(
            self._spec,
            sizes,
            query,
            kv_RW,
            self._vector(role + "kv_a_norm"),
            *turn,
            self._linear(role + "kv_b").weight,
            at,
        )

    def _grouped(
        self,
        role: str,
        x_RD: torch.Tensor,
        norm: ops.Norm,
        turn: tuple[torch.Tensor, torch.Tensor, bool],
        at: ops.Slots,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self._spec.attention
        assert not isinstance(sizes, LatentAttention)
        q, k, v = self._products(x_RD, tuple(role + part for part in "qkv"), norm)
        vector = self._weights.vector
        return ops.grouped_attention(
            self._spec,
            sizes,
            q,
            k,
            v,
            vector(role + "q_norm"),
            vector(role + "k_norm"),
            vector(role + "sinks"),
            *turn,
            at,
        )

    def _feed_forward(self, layer: int, x_RD: torch.Tensor) -> torch.Tensor:
        role, spec = f"layers.{layer}.", self._spec
        norm = self._norm(role + "ffn_norm")
        post = self._weights.vector(role + "post_ffn_norm")
        base_RD = None if post is not None else x_RD
        if spec.layers[layer].moe:
            branch_RD = self._experts(layer, x_RD, norm, base_RD)
        else:
            branch_RD = self._mlp(role, x_RD, norm, base_RD)
        return branch_RD if post is None else x_RD + rms_norm(branch_RD, post, spec.rms_norm_eps)

    def _experts(
        self, layer: int, x_RD: torch.Tensor, norm: ops.Norm, base_RD: torch.Tensor | None
    ) -> torch.Tensor:
        """Asks for the routed experts, adds the shared one to the base, then what was asked for."""
        spec, mailbox, role = self._spec, self._mailbox, f"layers.{layer}."
        assert isinstance(spec.moe, MoeSpec) and mailbox is not None
        logits_RE = self._product(x_RD, self._linear(role + "router"), norm=norm)
        correction = self._weights.vector(role + "router_correction")
        ids_Rk, weights_Rk = ops.route_and_post(
            spec.moe, logits_RE, correction, x_RD, mailbox, norm=norm
        )
        if spec.moe.shared_intermediate_size:
            gate = self._weights.linear(role + "shared_gate")
            if gate is None:
                base_RD = self._mlp(role + "shared.", x_RD, norm, base_RD)
            else:
                share_R1 = torch.sigmoid(self._product(x_RD, gate, norm=norm))
                branch_RD = self._mlp(role + "shared.", x_RD, norm, None) * share_R1
                base_RD = branch_RD if base_RD is None else base_RD + branch_RD
        if base_RD is None:
            base_RD = torch.zeros_like(x_RD)
        if self.hot is not None and layer in self.hot.layers:
            normed_RD = rms_norm(x_RD, norm.weight, norm.eps)
            base_RD = self.hot.add(layer, normed_RD, ids_Rk, weights_Rk, base_RD)
        return ops.wait(mailbox, base_RD)

    def _mlp(
        self, role: str, x_RD: torch.Tensor, norm: ops.Norm, add: torch.Tensor | None
    ) -> torch.Tensor:
        down = self._linear(role + "down")
        both = self._weights.linear(role + "gate", role + "up")
        if both is not None:
            joined = self._product(x_RD, both, norm=norm)
            return self._product(joined, down, add=add, gated=True)
        gate, up = self._products(x_RD, (role + "gate", role + "up"), norm)
        return self._product(activate(self._spec, gate, up), down, add=add)

    def _products(
        self, x_RD: torch.Tensor, roles: tuple[str, ...], norm: ops.Norm
    ) -> tuple[torch.Tensor, ...]:
        """Of several matrices, in one where they were joined."""
        joined = self._weights.linear(*roles)
        if joined is None:
            return tuple(self._product(x_RD, self._linear(role), norm=norm) for role in roles)
        outputs = self._product(x_RD, joined, norm=norm)
        sizes = self._weights.outputs(roles)
        return tuple(outputs.split(sizes, 1))  # type: ignore[no-untyped-call, unused-ignore]

    def _product(
        self,
        x: torch.Tensor,
        by: Linear,
        *,
        norm: ops.Norm | None = None,
        add: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        weight: Weight = by.weight
        return ops.linear(
            x,
            weight,
            work=self._work,
            bias=by.bias,
            norm=norm,
            add=add,
            gated=self._spec if gated else None,
            exact=self._exact,
        )

    def _linear(self, role: str) -> Linear:
        found = self._weights.linear(role)
        if found is None:
            raise LookupError(f"the model has no matrix for the role {role}")
        return found

    def _vector(self, role: str) -> torch.Tensor:
        found = self._weights.vector(role)
        if found is None:
            raise LookupError(f"the model has no vector for the role {role}")
        return found

    def _norm(self, role: str) -> ops.Norm:
        return ops.Norm(self._vector(role), self._spec.rms_norm_eps)
