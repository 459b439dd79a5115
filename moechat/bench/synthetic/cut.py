"""How much of a model this machine can hold: layers, then experts, are cut until it fits."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.bench.amounts import cache_variable
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.tensors import Recipe, Sizes, least_experts
from moechat.errors import DoesNotFit, Usage
from moechat.sizes import size_text

_SHARE_OF_RAM = 0.6  # the rest is for the KV cache, the program, and everybody else
_DISK_RESERVE_BYTES = 1_000_000_000
# Two, so that the time of one is the difference between models with one and with two.
_DENSE_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of memory that are free, and of the disk that the cache folder is on."""

    ram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The model to build, its stored bytes, and what a reader of the figures should know."""

    shape: Shape
    num_bytes: int
    notes: tuple[str, ...]


def plan_cut(
    whole: Shape, recipe: Recipe, layers: int | None, experts: int | None, room: Room
) -> Cut:
    """The largest part of ``whole`` that fits 60 % of the free memory, and the disk.

    ``layers`` (those with experts) and ``experts`` are wishes; None is what fits. Dense lead layers
    are two where the model has any: kinds of layers are told apart by models of different numbers
    of them. Raises Usage for wishes that no such model can have, DoesNotFit.
    """
    _check(whole, layers, experts)
    wished = layers is not None or experts is not None
    sizes = Sizes.of(whole, recipe)
    dense = _DENSE_LAYERS if whole.dense_layers else 0
    least_layers = whole.period * (1 if dense else 2)
    notes: list[str] = []
    if layers is not None and (layers < least_layers or layers % whole.period):
        wanted, layers = layers, max(-(-layers // whole.period) * whole.period, least_layers)
        notes.append(
            f"{layers} layers instead of {wanted}: fewer could not be told apart from the head"
            if whole.period == 1
            else f"{layers} layers instead of {wanted}: sliding and full attention alternate"
        )
    budget = min(int(_SHARE_OF_RAM * room.ram_bytes), room.disk_bytes - _DISK_RESERVE_BYTES)
    if experts is None:
        experts = _experts_that_fit(whole, sizes, dense, layers or least_layers, budget)
    if layers is None:
        layers = _layers_that_fit(whole, sizes, dense, least_layers, experts, budget)
    num_bytes = sizes.total(dense, layers, experts)
    # What was asked for in so many words may take more than a default would.
    limit = room.ram_bytes if wished else budget
    if num_bytes > limit or num_bytes + _DISK_RESERVE_BYTES > room.disk_bytes:
        raise _does_not_fit(whole, num_bytes, room, layers, experts)
    if experts < whole.experts:
        notes.append(
            f"{experts} of {whole.experts} experts a layer: as many bytes a token, since as many "
            "experts are chosen, but fewer of them to choose from, so that caches may hold more "
            "of them and prefill does more tokens with each"
        )
    shape = whole.cut(dense_layers=dense, moe_layers=layers, experts=experts)
    return Cut(shape, num_bytes, tuple(notes))


def _experts_that_fit(whole: Shape, sizes: Sizes, dense: int, layers: int, budget: int) -> int:
    """All of them if so many layers fit with all, or the most that do; the least in any case."""
    left = budget - sizes.total(dense, layers, 0)
    fit = left // (layers * sizes.expert) // whole.groups * whole.groups
    return int(max(min(fit, whole.experts), least_experts(whole)))


def _layers_that_fit(
    whole: Shape, sizes: Sizes, dense: int, least: int, experts: int, budget: int
) -> int:
    left = budget - sizes.total(dense, 0, experts)
    fit = left // (sizes.moe + experts * sizes.expert) // whole.period * whole.period
    return max(min(fit, whole.moe_layers), least)


def _check(whole: Shape, layers: int | None, experts: int | None) -> None:
    groups, least = whole.groups, least_experts(whole)
    if layers is not None and not 1 <= layers <= whole.moe_layers:
        raise Usage(
            f"--layers {layers} is not possible",
            f"{whole.name} has {whole.moe_layers} layers with experts",
        )
    if experts is not None and (not least <= experts <= whole.experts or experts % groups):
        multiple = f", a multiple of {groups}" if groups > 1 else ""
        raise Usage(
            f"--experts {experts} is not possible",
            f"{whole.name} needs {least} to {whole.experts} a layer{multiple}",
        )


def _does_not_fit(
    whole: Shape, num_bytes: int, room: Room, layers: int, experts: int
) -> DoesNotFit:
    plural = "s" if layers != 1 else ""
    return DoesNotFit(
        f"{layers} layer{plural} of {whole.name} with {experts} experts do not fit",
        f"{size_text(num_bytes)} are needed, {size_text(room.ram_bytes)} of memory and "
        f"{size_text(room.disk_bytes)} of disk are free",
        f"Fewer --layers or --experts need less; {cache_variable()} names another disk",
    )
