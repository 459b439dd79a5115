"""Resident weights: the experts' matrices copied to the machine's NUMA nodes (design 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moechat import _native
from moechat.engine.loading import LoadedModel
from moechat.errors import DoesNotFit, from_native
from moechat.sizes import size_text
from moechat.weights.free_memory import free_memory_bytes, free_node_bytes

Nodes = Sequence[tuple[int, list[int]]]  # number (-1: none, memory is not bound), CPUs
Progress = Callable[[int, int], None]  # bytes done, bytes in all

_SLICE_BYTES = 64 << 20  # between two looks at Ctrl-C
_DROPPED_BYTES = 1 << 30  # read of the files before their pages are let go
_USABLE = 0.95  # of free memory; the rest is for the KV cache and other programs


@dataclass(frozen=True)
class Residency:
    """What is resident where. ``num_mapped``: MLPs whose formats cannot be split."""

    node_bytes: tuple[int, ...]
    num_resident: int
    num_mapped: int
    native: _native.ResidentWeights

    @property
    def line(self) -> str:
        """One line for people."""
        shares = " + ".join(size_text(bytes_) for bytes_ in self.node_bytes)
        nodes = "1 NUMA node" if len(self.node_bytes) == 1 else f"{len(self.node_bytes)} NUMA nodes"
        text = f"resident on {nodes}: {shares}"
        if self.num_mapped:
            text += f"; {self.num_mapped} of {self.num_mapped + self.num_resident} MLPs stay mapped"
        return text


def make_resident(
    model: LoadedModel, pool: _native.ThreadPool, nodes: Nodes, progress: Progress | None = None
) -> Residency:
    """Copy every MLP of ``model``, a share to each node of ``pool``, and compute with the copies.

    ``progress`` is called after every slice; what it raises ends the work, as Ctrl-C does, and
    nothing stays allocated. Raises DoesNotFit before anything is allocated.
    """
    try:
        weights = _native.ResidentWeights(model.native, pool)
    except _native.NativeError as error:
        raise from_native(*error.args) from error
    try:
        node_bytes = weights.node_bytes
        _check_fits(node_bytes, [number for number, _ in nodes])
        done, dropped, total = 0, 0, sum(node_bytes)
        while copied := weights.fill(_SLICE_BYTES):
            done += copied
            if done - dropped >= _DROPPED_BYTES or done == total:
                model.files.drop_pages()
                dropped = done
            if progress is not None:
                progress(done, total)
        weights.install()
    except _native.NativeError as error:
        weights.release()
        raise from_native(*error.args) from error
    except BaseException:
        weights.release()
        raise
    return Residency(tuple(node_bytes), weights.num_resident, weights.num_mapped, weights)


def _check_fits(node_bytes: Sequence[int], nodes: Sequence[int]) -> None:
    """DoesNotFit unless the machine, and every node that is a real one, has room.

    Also a single node may be one of several: the only one with CPUs that this process may use.
    """
    _check("the machine has", sum(node_bytes), free_memory_bytes())
    if min(nodes) >= 0:
        for node, needed, free in zip(nodes, node_bytes, free_node_bytes(nodes)):
            _check(f"NUMA node {node} has", needed, free)


def _check(where: str, needed: int, free: int | None) -> None:
    if free is not None and needed > _USABLE * free:
        raise DoesNotFit(
            "the resident weights do not fit",
            f"they need {size_text(needed)}, {where} {size_text(free)} free",
            "Without --resident the weights are read where the files are mapped",
        )
