"""DeepSeek-V3 in float64, from its definition, the multi-token-prediction layer included.

Sources: DeepSeek-V2 report, section 2.1 (latent attention); DeepSeek-V3 report, sections 2.1.2
(experts) and 2.2 (multi-token prediction). Shapes: T tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from oracle_variants import float_tensors
from oracles import ORACLES

from moechat.models.architectures import load_spec


class Reference:
    """An oracle folder's weights in float64. Rotary frequencies are those of its ModelSpec."""

    def __init__(self, name: str) -> None:
        self.config = json.loads((ORACLES / name / "config.json").read_text())
        self.weights = {k: t.array.astype(np.float64) for k, t in float_tensors(name).items()}
        spec = load_spec(Path(ORACLES / name))
        self.softmax_scale, (self.rope,) = spec.softmax_scale, spec.ropes

    def hidden(self, ids: list[int]) -> np.ndarray:
        """[T, D] of the main model, after its final norm."""
        x_TD = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            x_TD = self._layer(layer, x_TD, np.arange(len(ids)))
        return self._norm(x_TD, "model.norm")

    def logits(self, ids: list[int]) -> np.ndarray:
        """[T, V] of the main model."""
        return self.hidden(ids) @ self.weights["lm_head.weight"].T

    def draft_logits(self, ids: list[int], positions: np.ndarray) -> np.ndarray:
        """[len(positions), V]: for position i, of the token at i + 2, as drafted from i and i + 1.

        The layer attends to these positions alone.
        """
        number = self.config["num_hidden_layers"]
        name = f"model.layers.{number}."
        next_ids = np.array(ids)[positions + 1]
        joined = np.concatenate(
            [
                self._norm(self.weights[name + "embed_tokens.weight"][next_ids], name + "enorm"),
                self._norm(self.hidden(ids)[positions], name + "hnorm"),
            ],
            axis=1,
        )
        x_TD = self._layer(number, joined @ self.weights[name + "eh_proj.weight"].T, positions)
        x_TD = self._norm(x_TD, name + "shared_head.norm")
        return x_TD @ self.weights[name + "shared_head.head.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]

    def _layer(self, number: int, x_TD: np.ndarray, positions: np.ndarray) -> np.ndarray:
        name = f"model.layers.{number}."
        x_TD = x_TD + self._attention(
            name + "self_attn.", self._norm(x_TD, name + "input_layernorm"), positions
        )
        normed_TD = self._norm(x_TD, name + "post_attention_layernorm")
        if number < self.config["first_k_dense_replace"]:
            return x_TD + self._mlp(name + "mlp.", normed_TD)
        return x_TD + self._experts(name + "mlp.", normed_TD)

    def _attention(self, name: str, x_TD: np.ndarray, positions: np.ndarray) -> np.ndarray:
        c, w = self.config, self.weights
        tokens, heads, rank = len(x_TD), c["num_attention_heads"], c["kv_lora_rank"]
        nope, rotated = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        latent = self._norm(x_TD @ w[name + "q_a_proj.weight"].T, name + "q_a_layernorm")
        q = (latent @ w[name + "q_b_proj.weight"].T).reshape(tokens, heads, nope + rotated)
        kv = x_TD @ w[name + "kv_a_proj_with_mqa.weight"].T
        latent = self._norm(kv[:, :rank], name + "kv_a_layernorm")
        expanded = (latent @ w[name + "kv_b_proj.weight"].T).reshape(tokens, heads, -1)
        shared_key = self._rotate(kv[:, None, rank:], positions)
        scores = np.einsum("ahd,bhd->hab", q[..., :nope], expanded[..., :nope])
        scores += np.einsum("ahd,bd->hab", self._rotate(q[..., nope:], positions), shared_key[:, 0])
        seen = positions[:, None] >= positions[None, :]
        scores = np.where(seen, scores * self.softmax_scale, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        values = np.einsum("hab,bhd->ahd", share, expanded[..., nope:])
        return values.reshape(tokens, -1) @ w[name + "o_proj.weight"].T

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Pairs (2 i, 2 i + 1) of [T, heads, rotated]; the halves come out one after the other."""
        angles = positions[:, None, None] * np.array(self.rope.inverse_frequencies)
        cos, sin = np.cos(angles) * self.rope.amplitude, np.sin(angles) * self.rope.amplitude
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self.weights[name + "gate_proj.weight"].T
        up = x @ self.weights[name + "up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[name + "down_proj.weight"].T

    def _experts(self, name: str, x_TD: np.ndarray) -> np.ndarray:
        c = self.config
        scores = 1 / (1 + np.exp(-x_TD @ self.weights[name + "gate.weight"].T))
        chosen_by = scores + self.weights[name + "gate.e_score_correction_bias"]
        groups = chosen_by.reshape(len(x_TD), c["n_group"], -1)
        group_scores = np.sort(groups, axis=-1)[..., -2:].sum(-1)
        y_TD = self._mlp(name + "shared_experts.", x_TD)
        for row, by_group in enumerate(groups.copy()):
            dropped = np.argsort(-group_scores[row])[c["topk_group"] :]
            by_group[dropped] = -np.inf
            ids = np.argsort(-by_group.reshape(-1))[: c["num_experts_per_tok"]]
            weights = scores[row, ids] / scores[row, ids].sum() * c["routed_scaling_factor"]
            for expert, weight in zip(ids, weights):
                y_TD[row] += weight * self._mlp(f"{name}experts.{expert}.", x_TD[row])
        return y_TD
