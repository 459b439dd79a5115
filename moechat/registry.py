"""models.toml: which models have a short name, what is known of them, and where they lie."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import ModelNotFound, Usage
from moechat.folders import config_folder
from moechat.gguf_magic import is_gguf

_PACKAGE = Path(__file__).parent
_FILE_NAME = "models.toml"
# Built into the wheel beside this file; in a source checkout it is at the top level.
_SHIPPED = (_PACKAGE / _FILE_NAME, _PACKAGE.parent / _FILE_NAME)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model with weights on this machine: a folder, or a GGUF file.

    ``entry`` is its models.toml table, if it has one.
    """

    name: str
    path: Path
    entry: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Registry:
    """The shipped models.toml with the user's own laid over it, by short name."""

    entries: dict[str, dict[str, Any]]

    def local_folder(self, name: str) -> Path | None:
        """The folder that an entry's weights should be in; None when it names none.

        Raises KeyError for an unknown name.
        """
        entry = self.entries[name]
        folder: str | None = entry.get("folder")
        if folder is not None:
            return config_folder() / os.path.expanduser(folder)
        package_data: str | None = entry.get("source", {}).get("package_data")
        return _PACKAGE / package_data if package_data else None

    def resolve(self, name_or_path: str) -> ResolvedModel:
        """A registry name, or else an existing folder or GGUF file.

        Raises ModelNotFound with what to do.
        """
        if name_or_path in self.entries:
            return self._resolve_name(name_or_path)
        path = os.path.expanduser(name_or_path)
        # os.path.isdir: unlike Path.is_dir, a whole question given as the model is just False.
        if path and os.path.isdir(path):
            folder = Path(os.path.abspath(path))
            return ResolvedModel(folder.name, folder, None)
        if path and os.path.isfile(path) and is_gguf(path):
            file = Path(os.path.abspath(path))
            return ResolvedModel(file.name.removesuffix(".gguf"), file, None)
        raise self._not_found(name_or_path, path)

    def _resolve_name(self, name: str) -> ResolvedModel:
        entry, folder = self.entries[name], self.local_folder(name)
        if folder is None:
            raise ModelNotFound(
                f"the weights of {name} are not on this machine",
                _describe_source(entry),
                f"With the files in a folder, give /path/to/folder in place of the name, or put "
                f'folder = "/path/to/folder" under [{_toml_key(name)}] in '
                f"{config_folder() / _FILE_NAME}",
            )
        if not os.path.isdir(folder) and not os.path.isfile(folder):
            raise ModelNotFound(f"the weights of {name} are gone", f"there is no folder {folder}")
        return ResolvedModel(name, folder, entry)

    def _not_found(self, name: str, path: str) -> ModelNotFound:
        shown = ascii(name if len(name) <= 60 else name[:57] + "...")
        what = f"no model and no folder is called {shown}"
        if path and os.path.isfile(path):
            what = f"{shown} is no GGUF file; a model is such a file, a folder or a name below"
        elif os.sep in path or path.endswith(".gguf"):
            return ModelNotFound(f"there is no file and no folder {shown}")
        close = difflib.get_close_matches(name[:60].lower(), self.entries, n=3)
        names = f"did you mean {' or '.join(close)}?" if close else ""
        known = f"known names: {', '.join(self.entries)}"
        return ModelNotFound(
            what,
            f"{names} {known}".strip(),
        )


def load_registry() -> Registry:
    """The shipped models.toml and the user's, read from disk. Raises Usage for a broken one."""
    shipped = next(path for path in _SHIPPED if path.is_file())
    entries = _read(shipped)
    own = config_folder() / _FILE_NAME
    if own.is_file():
        for name, table in _read(own).items():
            entries[name] = _overlay(entries.get(name, {}), table)
    return Registry(entries)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a models.toml. Raises Usage with the file and what is wrong in it."""
    # Imported by name: a type checker set to 3.10 would ask for tomli, which newer ones lack.
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    what = f"{path} cannot be used"
    try:
        tables: dict[str, dict[str, Any]] = toml.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Usage(what, f"it cannot be read ({error.strerror})") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise Usage(what, f"{error}", "Correct or remove it") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise Usage(what, f"{name!a} is no table", f"Write [{name}] and its fields below")
        for key, kind in (("folder", str), ("source", dict)):
            if not isinstance(table.get(key, kind()), kind):
                raise Usage(what, f"{key} of {name!a} has the wrong type", "Correct it")
        for key, value in table.get("source", {}).items():
            if not isinstance(value, str):
                raise Usage(what, f"source.{key} of {name!a} is no string", "Correct it")
    return tables


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, table by table."""
    merged = dict(below)
    for key, value in above.items():
        old: Any = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _overlay(old, value) if both else value
    return merged


def _toml_key(name: str) -> str:
    """A table's name as TOML wants it: names with dots are quoted."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _describe_source(entry: dict[str, Any]) -> str:
    """ "689 GB at huggingface.co/owner/name", as far as the entry says so."""
    repository = entry.get("source", {}).get("repository")
    place = f"at huggingface.co/{repository}" if repository else "at a place models.toml omits"
    size_bytes = entry.get("size_bytes")
    size = f"about {size_bytes / 1e9:.0f} GB " if isinstance(size_bytes, int) else ""
    return f"they are {size}{place}"
