"""The tensors of a model by GGUF's names: shapes as stored, and their roles in the model.

GGUF stacks experts, keeps several of a model's names for other things, and splits some matrices;
each such trap is declared here, so that the tensors are used as they lie in the file.
"""

from __future__ import annotations

import re
from collections.abc import Container

from moechat.models.gguf.rope import FACTORS_NAME
from moechat.models.gguf.traits import Presence, Traits
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec, MoeSpec, TensorSpec


def tensor_table(spec: ModelSpec, traits: Traits, stored: Container[str]) -> list[TensorSpec]:
    """Every tensor of the model. Optional ones are in it when ``stored`` has their names."""
    return _Table(spec, traits, stored).tensors()


def is_skipped(spec: ModelSpec, traits: Traits, name: str) -> bool:
    """Whether a tensor outside the table is known to be of no use here.

    These are multi-token-prediction layers, the rope factors, which are in the spec already, and
    halves of kv_b in files that hold it whole, too.
    """
    if name == FACTORS_NAME:
        return traits.rope_factors
    if traits.latent and name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
        return True
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return match is not None and 0 <= int(match[1]) - spec.num_layers < spec.num_mtp_layers


class _Table:
    """Collects the entries; ``_role`` and ``_name`` begin those of the layer at hand."""

    def __init__(self, spec: ModelSpec, traits: Traits, stored: Container[str]) -> None:
        self._spec, self._traits, self._stored = spec, traits, stored
        self._entries: list[TensorSpec] = []
        self._role = self._name = ""

    def tensors(self) -> list[TensorSpec]:
        spec, hidden = self._spec, self._spec.hidden_size
        self._matrix("embedding", "token_embd", spec.vocab_size, hidden)
        for number, layer in enumerate(spec.layers):
            self._role, self._name = f"layers.{number}.", f"blk.{number}."
            self._vector("attention_norm", "attn_norm.weight", hidden)
            if isinstance(spec.attention, LatentAttention):
                self._latent_attention(spec.attention)
            else:
                self._grouped_attention(spec.attention)
            self._vector("ffn_norm", f"{self._traits.ffn_norm}.weight", hidden)
            if self._traits.post_norms:
                self._vector("post_attention_norm", "post_attention_norm.weight", hidden)
                self._vector("post_ffn_norm", "post_ffw_norm.weight", hidden)
            if layer.moe and spec.moe is not None:
                self._experts(spec.moe)
            else:
                self._ffn("", "", spec.intermediate_size)
        self._role = self._name = ""
        self._vector("final_norm", "output_norm.weight", hidden)
        if not spec.tied_embeddings:
            self._matrix("head", "output", spec.vocab_size, hidden)
        return self._entries

    def _grouped_attention(self, attention: GroupedAttention) -> None:
        hidden, traits, head_dim = self._spec.hidden_size, self._traits, attention.head_dim
        rows_of = {
            "q": self._spec.num_heads * head_dim,
            "k": attention.num_kv_heads * head_dim,
            "v": attention.num_kv_heads * head_dim,
        }
        for part, rows in rows_of.items():
            self._matrix(part, f"attn_{part}", rows, hidden)
            self._vector(f"{part}_bias", f"attn_{part}.bias", rows, traits.qkv_bias)
        self._matrix("o", "attn_output", hidden, rows_of["q"])
        self._vector("o_bias", "attn_output.bias", hidden, traits.o_bias)
        for part in ("q", "k"):
            size = rows_of[part] if traits.whole_row_norms else head_dim
            self._vector(f"{part}_norm", f"attn_{part}_norm.weight", size, traits.qk_norm)
        if traits.sinks:
            self._vector("sinks", "attn_sinks.weight", self._spec.num_heads)

    def _latent_attention(self, attention: LatentAttention) -> None:
        hidden, heads, latent = self._spec.hidden_size, self._spec.num_heads, attention.kv_lora_rank
        nope_dim, rope_dim, v_dim = attention.nope_dim, attention.rope_dim, attention.v_dim
        query_rows, rank = heads * (nope_dim + rope_dim), attention.q_lora_rank
        if rank:
            self._matrix("q_a", "attn_q_a", rank, hidden)
            self._vector("q_a_norm", "attn_q_a_norm.weight", rank)
            self._matrix("q_b", "attn_q_b", query_rows, rank)
        else:
            self._matrix("q", "attn_q", query_rows, hidden)
        self._matrix("kv_a", "attn_kv_a_mqa", latent + rope_dim, hidden)
        self._vector("kv_a_norm", "attn_kv_a_norm.weight", latent)
        if f"{self._name}attn_kv_b.weight" in self._stored:  # files of before May 2025
            self._matrix("kv_b", "attn_kv_b", heads * (nope_dim + v_dim), latent)
        else:
            # Its two halves by head, that of the keys as [inputs, outputs].
            self._stacked("k_b.*", "attn_k_b", (heads, latent, nope_dim), transposed=True)
            self._stacked("v_b.*", "attn_v_b", (heads, v_dim, latent))
        self._matrix("o", "attn_output", hidden, heads * v_dim)

    def _experts(self, moe: MoeSpec) -> None:
        hidden, experts, size = self._spec.hidden_size, moe.num_experts, moe.intermediate_size
        traits = self._traits
        self._plain("router", "ffn_gate_inp.weight", (experts, hidden))
        if traits.expert_bias:
            self._vector("router_bias", "ffn_gate_inp.bias", experts)
        if moe.scoring == "sigmoid":
            self._vector("router_correction", "exp_probs_b.bias", experts)
        for part, rows, cols in (
            ("gate", size, hidden),
            ("up", size, hidden),
            ("down", hidden, size),
        ):
            self._stacked(f"experts.*.{part}", f"ffn_{part}_exps", (experts, rows, cols))
            if traits.expert_bias:
                role, name = f"experts.*.{part}_bias", f"ffn_{part}_exps.bias"
                self._plain(role, name, (experts, rows), stacked=True)
        if moe.shared_intermediate_size:
            self._ffn("shared.", "_shexp", moe.shared_intermediate_size)
        if traits.shared_gate:
            self._plain("shared_gate", "ffn_gate_inp_shexp.weight", (1, hidden))

    def _ffn(self, role: str, suffix: str, size: int) -> None:
        hidden = self._spec.hidden_size
        self._matrix(f"{role}gate", f"ffn_gate{suffix}", size, hidden)
        self._matrix(f"{role}up", f"ffn_up{suffix}", size, hidden)
        self._matrix(f"{role}down", f"ffn_down{suffix}", hidden, size)

    def _matrix(self, role: str, name: str, rows: int, cols: int) -> None:
        """A matrix that may be stored in blocks."""
        self._add(role, f"{name}.weight", (rows, cols), matrix=True)

    def _stacked(
        self, role: str, name: str, shape: tuple[int, int, int], transposed: bool = False
    ) -> None:
        """One matrix an expert or head, which may be stored in blocks."""
        self._add(role, f"{name}.weight", shape, matrix=True, stacked=True, transposed=transposed)

    def _vector(self, role: str, name: str, size: int, presence: Presence = "required") -> None:
        is_there = presence == "optional" and self._name + name in self._stored
        if presence == "required" or is_there:
            self._plain(role, name, (size,))

    def _plain(self, role: str, name: str, shape: tuple[int, ...], stacked: bool = False) -> None:
        """A tensor that is never quantised."""
        self._add(role, name, shape, stacked=stacked)

    def _add(
        self,
        role: str,
        name: str,
        shape: tuple[int, ...],
        matrix: bool = False,
        stacked: bool = False,
        transposed: bool = False,
    ) -> None:
        entry = TensorSpec(
            name=self._name + name,
            shape=shape,
            role=self._role + role,
            matrix=matrix,
            stacked=stacked,
            transposed=transposed,
        )
        self._entries.append(entry)
