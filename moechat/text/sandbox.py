"""Chat templates run in jinja2's immutable sandbox: they came with the checkpoint, from anyone."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from moechat.errors import CheckpointDamaged, Usage

if TYPE_CHECKING:
    import jinja2

# What a template may write on top of the messages: far more than any does.
_OWN_CHARACTERS = 1 << 20
_REPEAT_LIMIT = 1 << 16


class _RefusedError(Exception):
    """The template called raise_exception."""


def compile_template(source: str, name: str) -> jinja2.Template:
    """The template ready to render. Raises CheckpointDamaged naming it."""
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Also refuses short expressions that would fill the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
            raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not allowed")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise SecurityError("powers are not allowed")
            sizes = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
            counts = [v for v in (left, right) if isinstance(v, int)]
            if sizes and counts and sizes[0] * counts[0] > _REPEAT_LIMIT:
                raise SecurityError("a text or list is repeated too often")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja2 lets errors of the Python compiler through, too
        raise CheckpointDamaged(
            f"{name} cannot be used", f"it is not a template ({_short(error)})"
        ) from None


def render(
    template: jinja2.Template,
    context: Mapping[str, object],
    name: str,
    reveal: Callable[[str], str],
) -> str:
    """The prompt. ``reveal`` turns text of the template fit for an error message.

    Raises Usage when the template refuses the messages, CheckpointDamaged naming it when it fails.
    """
    from jinja2.exceptions import SecurityError

    room = _OWN_CHARACTERS + 2 * _characters(context)
    written: list[str] = []
    try:
        for part in template.generate(context):
            written.append(part)
            room -= len(part)
            if room < 0:
                raise SecurityError("it writes without end")
    except _RefusedError as refusal:
        raise Usage("the model's chat template refuses this", reveal(str(refusal))) from None
    except SecurityError as error:
        why = f"it does what no template may ({reveal(_short(error))})"
        raise CheckpointDamaged(f"{name} cannot be used", why) from None
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        why = f"it fails on this conversation ({reveal(_short(error))})"
        raise CheckpointDamaged(f"{name} cannot be used", why) from None
    return "".join(written)


def _characters(value: object) -> int:
    """All characters of the texts inside ``value``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(k) + _characters(v) for k, v in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as checkpoints' templates expect it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
