"""How much of a model this machine can hold: layers, then experts, are cut until it fits."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.bench.synthetic_config import Shape
from moechat.bench.synthetic_tensors import Recipe, Sizes, least_experts
from moechat.errors import DoesNotFit, Usage

_SHARE_OF_RAM = 0.6  # the rest is for the KV cache, the program, and everybody else
_DISK_RESERVE_BYTES = 1_000_000_000
# Two, so that the time of one is the difference between models with one and with two.
_DENSE_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for; None is what fits. ``layers`` counts those with experts."""

    layers: int | None = None
    experts: int | None = None
    vocab: int | None = None


NO_WISHES = Wishes()


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


def plan_cut(whole: Shape, recipe: Recipe, wishes: Wishes, room: Room) -> Cut:
    """The largest part of ``whole`` that fits 60 % of the free memory, and the disk.

    Dense lead layers are two where the model has any: kinds of layers are told apart by models of
    different numbers of them. Raises Usage for wishes that no such model can have, DoesNotFit.
    """
    _check(whole, wishes)
    vocab = wishes.vocab or whole.vocab
    sizes = Sizes.of(whole.cut(vocab=vocab), recipe)
    dense = _DENSE_LAYERS if whole.dense_layers else 0
    least_layers = whole.period * (1 if dense else 2)
    notes: list[str] = []
    layers = wishes.layers
    if layers is not None and (layers < least_layers or layers % whole.period):
        wanted, layers = layers, max(-(-layers // whole.period) * whole.period, least_layers)
        notes.append(
            f"{layers} layers instead of {wanted}: fewer could not be told apart from the head"
            if whole.period == 1
            else f"{layers} layers instead of {wanted}: sliding and full attention alternate"
        )
    budget = min(int(_SHARE_OF_RAM * room.ram_bytes), room.disk_bytes - _DISK_RESERVE_BYTES)
    experts = wishes.experts
    if experts is None:
        experts = _experts_that_fit(whole, sizes, dense, layers or least_layers, budget)
    if layers is None:
        layers = _layers_that_fit(whole, sizes, dense, least_layers, experts, budget)
    num_bytes = sizes.total(dense, layers, experts)
    # What was asked for in so many words may take more than a default would.
    limit = room.ram_bytes if wishes.layers or wishes.experts else budget
    if num_bytes > limit or num_bytes + _DISK_RESERVE_BYTES > room.disk_bytes:
        raise _does_not_fit(whole, num_bytes, room, layers, experts)
    if experts < whole.experts:
        notes.append(
            f"{experts} of {whole.experts} experts a layer: as many bytes a token, since as many "
            "experts are chosen, but fewer of them to choose from, so that caches may hold more "
            "of them and prefill does more tokens with each"
        )
    if vocab < whole.vocab:
        notes.append(f"a vocabulary of {vocab} instead of {whole.vocab}: a smaller head")
    shape = whole.cut(dense_layers=dense, moe_layers=layers, experts=experts, vocab=vocab)
    return Cut(shape, num_bytes, tuple(notes))


def _experts_that_fit(whole: Shape, sizes: Sizes, dense: int, layers: int, budget: int) -> int:
    """All of them if so many layers fit with all, or the most that do; the least in any case."""
    groups = max(whole.geometry.get("num_groups", 1), 1)
    left = budget - sizes.total(dense, layers, 0)
    fit = left // (layers * sizes.expert) // groups * groups
    return int(max(min(fit, whole.experts), least_experts(whole)))


def _layers_that_fit(
    whole: Shape, sizes: Sizes, dense: int, least: int, experts: int, budget: int
) -> int:
    left = budget - sizes.total(dense, 0, experts)
    fit = left // (sizes.moe + experts * sizes.expert) // whole.period * whole.period
    return max(min(fit, whole.moe_layers), least)


def _check(whole: Shape, wishes: Wishes) -> None:
    groups, least = max(whole.geometry.get("num_groups", 1), 1), least_experts(whole)
    if wishes.layers is not None and not 1 <= wishes.layers <= whole.moe_layers:
        raise Usage(
            f"--layers {wishes.layers} is not possible",
            f"{whole.name} has {whole.moe_layers} layers with experts",
        )
    if wishes.experts is not None and (
        not least <= wishes.experts <= whole.experts or wishes.experts % groups
    ):
        multiple = f", a multiple of {groups}" if groups > 1 else ""
        raise Usage(
            f"--experts {wishes.experts} is not possible",
            f"{whole.name} needs {least} to {whole.experts} a layer{multiple}",
        )
    if wishes.vocab is not None and not 256 <= wishes.vocab <= whole.vocab:
        raise Usage(
            f"--vocab {wishes.vocab} is not possible", f"allowed: 256 to {whole.vocab} tokens"
        )


def _does_not_fit(
    whole: Shape, num_bytes: int, room: Room, layers: int, experts: int
) -> DoesNotFit:
    plural = "s" if layers != 1 else ""
    return DoesNotFit(
        f"{layers} layer{plural} of {whole.name} with {experts} experts do not fit",
        f"{num_bytes / 1e9:.2f} GB are needed, {room.ram_bytes / 1e9:.2f} GB of memory and "
        f"{room.disk_bytes / 1e9:.2f} GB of disk are free",
        "Fewer --layers, --experts or --vocab need less",
    )
