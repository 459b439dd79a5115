"""The switches that a chat template has for thinking, under the names that users know."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from moechat.errors import BadParameter, Usage

THINK, EFFORT = "think", "reasoning_effort"
EFFORTS = ("low", "medium", "high")
_THINK_VARIABLES = ("enable_thinking", "thinking")  # Qwen, GLM and others; DeepSeek-V3.1
_EFFORT_VARIABLE = "reasoning_effort"  # gpt-oss
_THINK_VALUES = {"on": True, "off": False}
_EFFORT_VALUES = {effort: effort for effort in EFFORTS}


class ThinkingSwitches:
    """Values for the variables that a template reads; what is not set is the template's choice."""

    def __init__(self, template_variables: Set[str]) -> None:
        known = (name for name in _THINK_VARIABLES if name in template_variables)
        self._think = next(known, None)
        self._has_effort = _EFFORT_VARIABLE in template_variables
        self.variables: dict[str, Any] = {}  # to render the template with

    def set(self, name: str, value: str | None) -> None:
        """THINK to "on" or "off", EFFORT to one of EFFORTS; None: as the model has it by default.

        Raises BadParameter for another value, Usage where the model has no such switch.
        """
        if name == THINK:
            if self._think is None:
                hint = "It has --reasoning-effort" if self._has_effort else ""
                why = "its chat template reads no such variable"
                raise Usage("this model cannot be told to think or not", why, hint)
            self._set(self._think, value, _THINK_VALUES, name)
        else:
            if not self._has_effort:
                hint = "It has --think and --no-think" if self._think else ""
                why = "its chat template reads no such variable"
                raise Usage("this model has no reasoning effort to set", why, hint)
            self._set(_EFFORT_VARIABLE, value, _EFFORT_VALUES, name)

    def describe(self) -> list[tuple[str, str | None]]:
        """The switches that the model has, with their values."""
        rows: list[tuple[str, str | None]] = []
        if self._think is not None:
            value = self.variables.get(self._think)
            rows.append((THINK, None if value is None else "on" if value else "off"))
        if self._has_effort:
            rows.append((EFFORT, self.variables.get(_EFFORT_VARIABLE)))
        return rows

    def _set(self, variable: str, value: str | None, values: Mapping[str, Any], name: str) -> None:
        if value is None:
            self.variables.pop(variable, None)
        elif value in values:
            self.variables[variable] = values[value]
        else:
            raise BadParameter(f"{name} cannot be {value[:40]!a}", f"it can be {', '.join(values)}")
