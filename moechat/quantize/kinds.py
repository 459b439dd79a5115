"""What a tensor is for, by its public name: which ones are quantised, and how a report groups them.

Quantised are the projections of attention and of feed-forward blocks, in the layers of the language
model. What is small or known to be sensitive stays as it is: embeddings, head, norms, biases,
routers, and what readers of the public formats build without quantisation.
"""

from __future__ import annotations

import re

KINDS = (
    "attention",
    "dense MLP",
    "shared experts",
    "routed experts",
    "embeddings",
    "head",
    "norms",
    "routers",
    "biases",
    "other",
)

_MATRIX = re.compile(
    r"(?:model\.|language_model\.)*layers\.\d+\.(?:.+\.)?"
    r"(?P<module>\w+_proj|kv_a_proj_with_mqa|w[123])\.weight"
)
# The input of a multi-token-prediction layer, and the head weights of DeepSeek-V3.2's indexer:
# public readers take neither quantised.
_KEPT_MODULES = ("eh_proj", "weights_proj")

# The first pattern that is found decides.
_KIND_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("biases", r"(\.|_)bias$(?<!e_score_correction_bias)"),
        ("routers", r"(\.gate|\.router|\.shared_expert_gate)\."),
        ("norms", r"norm[^.]*(\.weight)?$"),
        ("head", r"(^|\.)(lm_head|shared_head\.head)\."),
        ("embeddings", r"embed"),
        ("shared experts", r"\.shared_experts?\."),
        ("routed experts", r"\.experts\."),
        ("attention", r"\.(self_attn|attention|attn)\."),
        ("dense MLP", r"\.(mlp|feed_forward)\."),
    )
)


def is_matrix(name: str, num_dimensions: int) -> bool:
    """Whether a tensor is the matrix of a linear layer that the quantised formats hold."""
    match = _MATRIX.fullmatch(name)
    return match is not None and num_dimensions == 2 and match["module"] not in _KEPT_MODULES


def is_stacked_experts(name: str, num_dimensions: int) -> bool:
    """Whether a tensor holds the matrices of all experts of a layer."""
    return num_dimensions > 2 and ".experts." in name


def kind_of(name: str) -> str:
    """One of ``KINDS``."""
    return next((kind for kind, pattern in _KIND_PATTERNS if pattern.search(name)), "other")


def module_of(name: str, num_dimensions: int) -> str | None:
    """The module that readers may take for a linear layer; None for what they cannot.

    An embedding is no linear layer. A router may be one.
    """
    if num_dimensions != 2 or not name.endswith(".weight") or kind_of(name) == "embeddings":
        return None
    return name.removesuffix(".weight")
