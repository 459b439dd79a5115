"""The tensors of a multi-token-prediction layer, which drafts the token after the next one.

Names: model.layers.<num_layers>.*, after the layers of the main model (README_WEIGHTS of
DeepSeek-V3). cpp/model/draft_input.h has the definition.
"""

from __future__ import annotations

from collections.abc import Collection

from moechat.errors import BadParameter
from moechat.models.decoder_tensors import Part, linear, matrix, vector
from moechat.models.spec import ModelSpec, TensorSpec

ROLE = "draft."
# Copies of the main model's; what is not stored is taken from there.
_SHARED = (ROLE + "embedding", ROLE + "head")


def draft_prefix(spec: ModelSpec) -> str:
    """How the names of the first such layer begin."""
    return f"model.layers.{spec.num_layers}."


def draft_table(spec: ModelSpec, attention: Part, moe: Part) -> list[TensorSpec]:
    """Every tensor of the first such layer, its own copies of embedding and head included."""
    name, hidden = draft_prefix(spec), spec.hidden_size
    vectors = {
        "token_norm": "enorm",
        "hidden_norm": "hnorm",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "final_norm": "shared_head.norm",
    }
    return [
        *(vector(ROLE + part, f"{name}{norm}.weight", hidden) for part, norm in vectors.items()),
        linear(ROLE + "projection", name + "eh_proj", hidden, 2 * hidden),
        *attention(spec, ROLE, name),
        *moe(spec, ROLE, name),
        matrix(ROLE + "embedding", name + "embed_tokens.weight", spec.vocab_size, hidden),
        linear(ROLE + "head", name + "shared_head.head", spec.vocab_size, hidden),
    ]


def stored_draft_table(
    spec: ModelSpec, table: list[TensorSpec] | None, names: Collection[str]
) -> list[TensorSpec]:
    """The part of a draft table that a checkpoint with these names must have.

    ``table`` None: the architecture has none. Raises BadParameter when there is nothing to draft
    with.
    """
    own = [name for name in names if name.startswith(draft_prefix(spec))]
    reason = ""
    if spec.num_mtp_layers == 0:
        reason = "it has no multi-token-prediction layer"
    elif table is None:
        reason = f"moechat does not use the multi-token-prediction layer of {spec.architecture}"
    elif not own:
        reason = "its files leave out the multi-token-prediction layer"
    if table is None or reason:
        raise BadParameter(
            "speculation is not possible with this model", reason, "Leave out --speculate"
        )
    return [
        entry
        for entry in table
        if entry.role not in _SHARED
        or any(name.startswith(entry.name.removesuffix("weight")) for name in own)
    ]
