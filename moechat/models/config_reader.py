"""Reads config.json key by key, so that no setting is silently ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moechat.errors import ArchitectureUnsupported

_MISSING: Any = object()


class ConfigReader:
    """One JSON object of a config file; remembers which keys were asked for.

    ``where`` names it in messages. Every method raises ArchitectureUnsupported, naming the key.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._asked: set[str] = set()

    def integer(self, key: str, low: int, high: int, default: int = _MISSING) -> int:
        """An integer within [low, high]; a missing or null key gives the default, if any."""
        value = self._get(key, default)
        if default is not _MISSING and not self.has(key):
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.unsupported(key, f"an integer from {low} to {high} is needed")
        return value

    def number(self, key: str, low: float, high: float, default: float = _MISSING) -> float:
        """A finite number within [low, high]; a missing or null key gives the default, if any."""
        value = self._get(key, default)
        if default is not _MISSING and not self.has(key):
            return default
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false
            raise self.unsupported(key, f"a number from {low} to {high} is needed")
        return float(value)

    def boolean(self, key: str, default: bool = _MISSING) -> bool:
        """true or false; a missing or null key gives the default, if any."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.unsupported(key, "true or false is needed")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there, null included."""
        self._asked.add(key)
        return key in self._values

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, or None when the key is missing or null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.unsupported(key, "an object is needed")
        return ConfigReader(value, f"{self._where} {key}")

    def text(self, key: str) -> str | None:
        """A string, or None when the key is missing or null."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, str):
            raise self.unsupported(key, "a string is needed")
        return value

    def sections(self, key: str) -> list[ConfigReader]:
        """The objects of an object of objects; none when the key is missing or null."""
        outer = self.section(key)
        if outer is None:
            return []
        found = [outer.section(name) for name in outer._values]
        return [section for section in found if section is not None]

    def texts(self, key: str, *allowed: str) -> tuple[str, ...]:
        """A list of strings out of those allowed; empty when the key is missing or null."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(item not in allowed for item in value):
            raise self.unsupported(key, f"a list of {' and '.join(map(repr, allowed))} is needed")
        return tuple(value)

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers within [low, high]; empty when the key is missing or null."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(
            type(item) is not int or not low <= item <= high for item in value
        ):
            raise self.unsupported(key, f"a list of integers from {low} to {high} is needed")
        return tuple(value)

    def alias(self, other: str, key: str) -> None:
        """Let ``other`` stand for ``key``; given both, they must be equal."""
        value = self._get(other, None)
        if value is None:
            return
        if not self.has(key):
            self._values = self._values | {key: value}
        elif self._values[key] != value:
            raise self.unsupported(other, f"{key} says {ascii(self._values[key])[:80]}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; none when the key is missing or null."""
        value = self._get(key, None)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(item) is not int or not 0 <= item < vocab_size for item in ids):
            raise self.unsupported(key, f"token ids from 0 to {vocab_size - 1} are needed")
        return tuple(ids)

    def only(self, key: str, *allowed: Any, required: bool = False) -> None:
        """Refuse any other value than those allowed; missing or null is fine unless required.

        With none allowed any value is refused.
        """
        value = self._get(key, None)
        if value is None and not required:
            return
        # Compared with the type: true is no 1, and 1.0 no integer.
        if not any(type(value) is type(good) and value == good for good in allowed):
            good = f"only {' or '.join(map(repr, allowed))} is" if allowed else "it is not"
            raise self.unsupported(key, f"{good} implemented")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse keys that nothing asked for, except those known not to matter and nulls.

        Null is how config files say that a setting is not used.
        """
        given = {key for key, value in self._values.items() if value is not None}
        unknown = sorted(given - self._asked - set(harmless))
        if unknown:
            names = ", ".join(ascii(key[:80]) for key in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise ArchitectureUnsupported(
                f"{self._where} has settings that moechat does not know",
                f"{names}{more}",
            )

    def unsupported(self, key: str, why: str) -> ArchitectureUnsupported:
        """The error for a key's value."""
        if key not in self._values:
            return ArchitectureUnsupported(f"{self._where} lacks {key}", why)
        value = ascii(self._values[key])
        if len(value) > 80:
            value = value[:77] + "..."
        return ArchitectureUnsupported(f"{self._where} has {key} = {value}", why)

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self._values.get(key)
        return default if value is None else value
