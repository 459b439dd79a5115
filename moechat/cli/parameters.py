"""Parameter counts for ``list`` and ``show``: of a model's files, or of a models.toml entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import MoechatError

if TYPE_CHECKING:
    from moechat.bench.synthetic.config import Shape
    from moechat.models.parameters import Parameters

_UNITS = ("", "k", "M", "B", "T")


def parameters_of(name: str, entry: dict[str, Any] | None, path: Path | None) -> dict[str, int]:
    """``parameters`` and, with experts, ``active_parameters``; empty when nothing tells them.

    From config.json or the GGUF header at ``path``, else from the entry's geometry and config: no
    weights are read.
    """
    found = None if path is None else _of_files(path)
    if found is None and entry is not None:
        found = _of_entry(name, entry)
    if found is None:
        return {}
    counts = {"parameters": found.total, "active_parameters": found.active}
    return {key: count for key, count in counts.items() if count is not None}


def parameters_text(facts: dict[str, Any]) -> str:
    """ "671B (37B active)" of parameters_of's result, "1.24B" without experts, "-" for unknown."""
    if "parameters" not in facts:
        return "-"
    text = format_count(facts["parameters"], 3)
    active = facts.get("active_parameters")
    return text if active is None else f"{text} ({format_count(active, 2)} active)"


def format_count(count: int, digits: int) -> str:
    """A number for people: so many significant digits, and k, M, B or T."""
    size, unit = float(f"{count:.{digits}g}"), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:g}{_UNITS[unit]}"


def _of_files(path: Path) -> Parameters | None:
    from moechat.models.architectures import load_config, load_spec, tensor_table
    from moechat.models.parameters import count_parameters
    from moechat.weights.gguf_find import find_gguf

    try:
        if find_gguf(path) is None:
            spec = load_spec(path)
            return count_parameters(tensor_table(spec, load_config(path)), spec)
        # Imported here, with numpy: `moechat list` is quick while there are no GGUF files.
        from moechat.engine.model_files import find_model_files

        files = find_model_files(path)
        return count_parameters([tensor.spec for tensor in files.bind()], files.spec)
    except MoechatError:
        return None


def _of_entry(name: str, entry: dict[str, Any]) -> Parameters | None:
    """Of two models with few experts, and from these along a line: the whole table takes long."""
    from moechat.bench.synthetic.config import Shape
    from moechat.bench.synthetic.tensors import least_experts
    from moechat.models.parameters import Parameters

    try:
        shape = Shape.of_entry(name, entry)
        step = least_experts(shape)
        if shape.experts < step:
            return None
        one, two = (_of_shape(shape.cut(experts=count)) for count in (step, 2 * step))
    # An entry of the user's may say anything.
    except (MoechatError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    counts = [
        first + (shape.experts - step) * (second - first) // step
        for first, second in ((one.total, two.total), (one.active or 0, two.active or 0))
    ]
    return Parameters(*counts)


def _of_shape(shape: Shape) -> Parameters:
    from moechat.bench.synthetic.config import config_of
    from moechat.models.architectures import read_spec, tensor_table
    from moechat.models.parameters import count_parameters

    config = config_of(shape)
    spec = read_spec(config, {})
    return count_parameters(tensor_table(spec, config), spec)
