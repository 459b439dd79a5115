"""Routed experts as GGUF metadata has them."""

from __future__ import annotations

from typing import NamedTuple

from moechat.models.bounds import MAX_EXPERTS_IN_ALL, MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.gguf.traits import GGUFSource, Traits
from moechat.models.spec import MoeSpec, Scoring

# Layers, hidden size, experts: groups and groups kept of DeepSeek-V3 (and R1) and DeepSeek-V2,
# whose early files do not state them.
_KNOWN_GROUPS = {(61, 7168, 256): (8, 4), (60, 5120, 160): (8, 3)}
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}


class Routing(NamedTuple):
    """Layers from ``first_layer`` on have experts; none when ``moe`` is None."""

    moe: MoeSpec | None
    first_layer: int


def read_routing(
    read: ConfigReader, source: GGUFSource, traits: Traits, num_layers: int, hidden_size: int
) -> Routing:
    """The MoE settings. Raises ArchitectureUnsupported, naming the key."""
    lowest = 1 if traits.moe == "required" else 0
    highest = 0 if traits.moe == "absent" else 4096
    default = {} if lowest else {"default": 0}
    num_experts = read.integer("expert_count", lowest, highest, **default)
    first_layer = read.integer("leading_dense_block_count", 0, num_layers, default=0)
    if not num_experts:
        read.only("expert_used_count", 0)
        for key in ("expert_feed_forward_length", "expert_shared_count"):
            read.integer(key, 0, MAX_SIZE, default=0)
        return Routing(None, num_layers)
    if num_layers * num_experts > MAX_EXPERTS_IN_ALL:
        raise read.unsupported("expert_count", f"over {MAX_EXPERTS_IN_ALL} experts in all")
    dense_size = read.integer("feed_forward_length", 0, MAX_SIZE, default=0)
    expert_size = read.integer("expert_feed_forward_length", 1, MAX_SIZE, default=dense_size)
    groups, groups_kept = _groups(read, num_layers, hidden_size, num_experts)
    available = groups_kept * (num_experts // groups)
    moe = MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=read.integer("expert_used_count", 1, available),
        intermediate_size=expert_size,
        shared_intermediate_size=_shared_size(read, traits, expert_size, dense_size),
        scoring=_scoring(read, source, traits),
        num_groups=groups,
        num_groups_kept=groups_kept,
        normalise_weights=read.boolean("expert_weights_norm", default=traits.normalise_weights),
        routed_scaling=read.number("expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
    )
    return Routing(moe, first_layer)


def _shared_size(read: ConfigReader, traits: Traits, expert_size: int, dense_size: int) -> int:
    """Rows of the shared expert: several side by side count as one."""
    if traits.shared_gate:
        return read.integer("expert_shared_feed_forward_length", 1, MAX_SIZE, default=dense_size)
    return read.integer("expert_shared_count", 0, 64, default=0) * expert_size


def _groups(
    read: ConfigReader, num_layers: int, hidden_size: int, num_experts: int
) -> tuple[int, int]:
    known, known_kept = _KNOWN_GROUPS.get((num_layers, hidden_size, num_experts), (1, 1))
    groups = read.integer("expert_group_count", 0, num_experts, default=known) or 1
    if num_experts % groups:
        raise read.unsupported("expert_group_count", f"it must divide the {num_experts} experts")
    if groups > 1 and num_experts // groups < 2:
        raise read.unsupported("expert_group_count", "a group is scored by its two best experts")
    if groups == 1:
        return 1, read.integer("expert_group_used_count", 0, 1, default=1) or 1
    default = {"default": known_kept} if groups == known else {}
    return groups, read.integer("expert_group_used_count", 1, groups, **default)


def _scoring(read: ConfigReader, source: GGUFSource, traits: Traits) -> Scoring:
    read.only("expert_gating_func", 0, *_SCORINGS)
    stated = read.integer("expert_gating_func", 0, 3, default=0)
    if stated:
        return _SCORINGS[stated]
    # Files of DeepSeek's architecture that say nothing: only sigmoid scoring is corrected.
    corrected = any(name.endswith(".exp_probs_b.bias") for name in source.tensors)
    return "sigmoid" if corrected else traits.scoring
