"""A model as deep as the original where only some of its layers are on disk: they come again.

What a layer costs does not depend on its values, so that times of all layers need no extrapolation.
A layer returns only after others of many gigabytes: no cache still has it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.engine import loading
from moechat.engine.model_files import ModelFiles, find_model_files
from moechat.models.spec import BoundTensor, ModelSpec


@contextlib.contextmanager
def deepened(num_layers: int) -> Iterator[None]:
    """Models that are opened have ``num_layers`` layers: the MoE layers follow one another again
    and again after the last."""

    def find(path: Path) -> Any:
        return _Deep(find_model_files(path), num_layers)

    with mock.patch.object(loading, "find_model_files", find):
        yield


@contextlib.contextmanager
def synthetic(layers: int, folder: str | Path | None = None) -> Iterator[Path]:
    """A folder with 3 dense and ``layers`` MoE layers of DeepSeek-V3, of random weights."""
    with tempfile.TemporaryDirectory(dir=folder) as path:
        whole = Shape.of_entry("deepseek-v3", model_entry("deepseek-v3"))
        shape = whole.cut(moe_layers=layers)
        write_model(Path(path), shape, Recipe.of(shape, None), lambda done, of: None)
        yield Path(path)


def deep_tensors(spec: ModelSpec, tensors: list[BoundTensor], num_layers: int) -> list[BoundTensor]:
    """``tensors`` of the model of ``spec``, those of repeated layers several times."""
    source = _sources(spec, num_layers)
    by_layer: dict[int, list[BoundTensor]] = {}
    others = []
    for tensor in tensors:
        words = tensor.spec.role.split(".")
        if words[0] == "layers":
            by_layer.setdefault(int(words[1]), []).append(tensor)
        else:
            others.append(tensor)
    deep = [
        replace(tensor, spec=replace(tensor.spec, role=_role(tensor.spec.role, layer)))
        for layer in range(num_layers)
        for tensor in by_layer[source[layer]]
    ]
    return others + deep


class _Deep:
    """ModelFiles of a deep model."""

    def __init__(self, files: ModelFiles, num_layers: int) -> None:
        self._files, self._num_layers = files, num_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    @property
    def spec(self) -> ModelSpec:
        spec = self._files.spec
        layers = tuple(spec.layers[source] for source in _sources(spec, self._num_layers))
        return replace(spec, layers=layers)

    def bind(self, speculate: bool = False) -> list[BoundTensor]:
        return deep_tensors(self._files.spec, self._files.bind(speculate), self._num_layers)


def _sources(spec: ModelSpec, num_layers: int) -> list[int]:
    """Of each layer of the deep model the layer that it is."""
    dense = sum(not layer.moe for layer in spec.layers)
    moe = spec.num_layers - dense
    return [i if i < dense else dense + (i - dense) % moe for i in range(num_layers)]


def _role(role: str, layer: int) -> str:
    return ".".join(("layers", str(layer), *role.split(".")[2:]))
