"""The part of config.json that models with routed experts share."""

from __future__ import annotations

from moechat.models.bounds import MAX_EXPERTS_IN_ALL, MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import num_layers
from moechat.models.spec import MoeSpec


def num_experts(read: ConfigReader, key: str) -> int:
    """Experts of a layer, bounded in all."""
    experts = read.integer(key, 1, 4096)
    if num_layers(read) * experts > MAX_EXPERTS_IN_ALL:
        raise read.unsupported(key, f"over {MAX_EXPERTS_IN_ALL} experts in all")
    return experts


def softmax_experts(
    read: ConfigReader, *, size_key: str = "moe_intermediate_size", key: str = "num_experts"
) -> MoeSpec:
    """Softmax over all experts, the best few taken; norm_topk_prob divides by their sum."""
    experts = num_experts(read, key)
    return MoeSpec(
        num_experts=experts,
        num_experts_per_token=read.integer("num_experts_per_tok", 1, experts),
        intermediate_size=read.integer(size_key, 1, MAX_SIZE),
        normalise_weights=read.boolean("norm_topk_prob", default=False),
    )


def grouped_experts(read: ConfigReader, *, groups_required: bool) -> MoeSpec:
    """Sigmoid scores, a correction for the choice, groups of experts: DeepSeek-V3's routing."""
    read.only("scoring_func", "sigmoid")
    read.only("topk_method", "noaux_tc")
    experts = num_experts(read, "n_routed_experts")
    groups, kept = expert_groups(read, experts, required=groups_required)
    if groups > 1 and experts // groups < 2:
        raise read.unsupported("n_group", "a group is scored by its two best experts")
    return MoeSpec(
        num_experts=experts,
        num_experts_per_token=read.integer("num_experts_per_tok", 1, kept * (experts // groups)),
        intermediate_size=read.integer("moe_intermediate_size", 1, MAX_SIZE),
        shared_intermediate_size=shared_size(read),
        scoring="sigmoid",
        num_groups=groups,
        num_groups_kept=kept,
        normalise_weights=read.boolean("norm_topk_prob"),
        routed_scaling=routed_scaling(read),
    )


def expert_groups(read: ConfigReader, experts: int, *, required: bool) -> tuple[int, int]:
    """n_group, and topk_group: how many of them a token may use.

    Without the keys there is one group, unless they are ``required``: where the family's reference
    has other defaults, a file that does not state them is not understood.
    """
    groups = read.integer("n_group", 1, experts, **({} if required else {"default": 1}))
    if experts % groups:
        raise read.unsupported("n_group", f"it must divide the {experts} experts")
    optional = groups == 1 and not required
    return groups, read.integer("topk_group", 1, groups, **({"default": 1} if optional else {}))


def shared_size(read: ConfigReader) -> int:
    """n_shared_experts are one MLP of so many times the size of a routed expert."""
    size = read.integer("moe_intermediate_size", 1, MAX_SIZE)
    return size * read.integer("n_shared_experts", 1, 64)


def routed_scaling(read: ConfigReader) -> float:
    """routed_scaling_factor, by which the routed experts' weights are multiplied."""
    return read.number("routed_scaling_factor", 1e-6, 1e6)


def dense_first(read: ConfigReader) -> tuple[bool, ...]:
    """Which layers have experts where the first first_k_dense_replace do not."""
    layers = num_layers(read)
    dense = read.integer("first_k_dense_replace", 0, layers)
    return tuple(layer >= dense for layer in range(layers))


def sparse_by_step(read: ConfigReader) -> tuple[bool, ...]:
    """Which layers have experts in Qwen models: every decoder_sparse_step-th, if not excepted."""
    step = read.integer("decoder_sparse_step", 1, 1024, default=1)
    dense = set(read.integers("mlp_only_layers", 0, 1023))
    layers = range(num_layers(read))
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)
