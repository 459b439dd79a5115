"""The sampling values of a chat, each with the place it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moechat.errors import BadParameter
from moechat.sample.params import SamplingParams

_INTEGERS = frozenset({"top_k", "seed", "max_tokens"})
_HIDDEN = frozenset({"ignore_end"})  # for measurements, not for talks
_OFF = "none"
RESET = "default"  # the word for the value at start


class Settings:
    """Sampling values by name; origin "flag", "model", "default" or "set".

    ``model`` holds what the checkpoint asks for, ``flags`` what the command line set; a flag that
    is None was not given. Raises BadParameter.
    """

    def __init__(
        self, model: SamplingParams | None = None, flags: Mapping[str, Any] | None = None
    ) -> None:
        neutral = SamplingParams()
        self._params = model or neutral
        self._origins = {
            name: "default" if getattr(self._params, name) == getattr(neutral, name) else "model"
            for name in self.names()
        }
        for name, value in (flags or {}).items():
            if value is not None:
                self._replace(name, tuple(value) if name == "stop" else value, "flag")
        self._initial = {
            name: (getattr(self._params, name), self._origins[name]) for name in self.names()
        }

    @staticmethod
    def names() -> list[str]:
        """What can be set, in order."""
        fields = dataclasses.fields(SamplingParams)
        return [field.name for field in fields if field.name not in _HIDDEN]

    def params(self) -> SamplingParams:
        """The values for the next answer."""
        return self._params

    def set_text(self, name: str, text: str) -> None:
        """Set a value as typed; "none" is no value, "default" the one at start.

        Raises BadParameter and then sets nothing.
        """
        name = name.replace("-", "_").lower()
        if name not in self.names():
            raise BadParameter(
                f"there is no setting {name!a}", next_step=f"Settings: {', '.join(self.names())}"
            )
        if text == RESET:
            value, origin = self._initial[name]
            self._replace(name, value, origin)
        else:
            self._replace(name, _parse(name, text), "set")

    def describe(self) -> list[tuple[str, str, str]]:
        """All settings as (name, value, origin)."""
        return [
            (name, _show(getattr(self._params, name)), self._origins[name]) for name in self.names()
        ]

    def _replace(self, name: str, value: Any, origin: str) -> None:
        self._params = dataclasses.replace(self._params, **{name: value})
        self._origins[name] = origin


def _parse(name: str, text: str) -> Any:
    neutral = getattr(SamplingParams(), name)
    if text == _OFF and (neutral is None or neutral == ()):
        return neutral
    if name == "stop":
        return (text,)
    try:
        return int(text) if name in _INTEGERS else float(text)
    except ValueError:
        kind = "a whole number" if name in _INTEGERS else "a number"
        raise BadParameter(f"{name} must be {kind}, not {text[:40]!a}") from None


def _show(value: Any) -> str:
    if value is None or value == ():
        return _OFF
    return " ".join(map(ascii, value)) if isinstance(value, tuple) else str(value)
