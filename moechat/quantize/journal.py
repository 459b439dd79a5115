"""What is done of a job that may be killed at any moment: one line for each finished layer.

Lines are only appended. One is written after the layer's bytes are on disk, so what it says holds
after a power cut, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from moechat.errors import Usage
from moechat.json_file import parse_json_object
from moechat.quantize.target import JOURNAL_NAME, make_folder, sync_folder, writing


class Record(NamedTuple):
    """A finished layer: its index in the plan, and what was measured of it."""

    layer_index: int
    squared_error: float
    squared_sum: float


class Journal:
    """The journal of one job, locked against other processes while it is open."""

    def __init__(self, folder: Path, identity: dict[str, str], num_layers: int) -> None:
        """Begin a journal in ``folder``, which is made if need be, or take up the one there.

        ``identity`` says which job it is. Raises Usage when the journal there is that of another
        job, when another process works on it, or when the folder cannot be made.
        """
        self._num_layers = num_layers
        self.path = folder / JOURNAL_NAME
        self.records: dict[int, Record] = {}
        make_folder(folder)
        with writing(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._take_up(folder, identity)
            except BaseException:
                self.close()
                raise

    def append(self, records: list[Record]) -> None:
        """Note finished layers, whose bytes are on disk, for good."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        self._write(lines.encode())
        self.records.update((record.layer_index, record) for record in records)

    def forget(self, layer_indices: list[int]) -> None:
        """Note that these layers are to be done again: their bytes are gone."""
        if not layer_indices:
            return
        self._write("".join(json.dumps([index]) + "\n" for index in layer_indices).encode())
        for index in layer_indices:
            self.records.pop(index, None)

    def remove(self) -> None:
        """The job is complete."""
        with writing(self.path):
            self.path.unlink()
            sync_folder(self.path.parent)
        self.close()

    def close(self) -> None:
        """Let go of the file and its lock."""
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1

    def _take_up(self, folder: Path, identity: dict[str, str]) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Usage(
                f"another process is writing {folder}", next_step="Wait for it or stop it"
            ) from None
        content = b""
        while piece := os.read(self._file, 1 << 20):
            content += piece
        # A line without its end was being written when the process died.
        whole = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, len(whole), os.SEEK_SET)
        if not whole:
            self._write((json.dumps(identity) + "\n").encode())
            sync_folder(folder)
            sync_folder(folder.parent)
            return
        first, *lines = whole.splitlines()
        self._check_identity(folder, first, identity)
        for line in lines:
            if not self._replay(line):
                raise self._foreign(folder, "a line of its journal cannot be read")

    def _replay(self, line: bytes) -> bool:
        """Take in one line, ``[index, error, sum]`` or ``[index]``; False when it is neither."""
        try:
            index, *squares = json.loads(line)
        except (ValueError, TypeError):
            return False
        if type(index) is not int or not 0 <= index < self._num_layers:
            return False
        if not squares:
            self.records.pop(index, None)
            return True
        if len(squares) != 2 or any(type(value) is not float for value in squares):
            return False
        self.records[index] = Record(index, *squares)
        return True

    def _check_identity(self, folder: Path, line: bytes, identity: dict[str, str]) -> None:
        try:
            found = parse_json_object(line)
        except ValueError:
            raise self._foreign(folder, "its journal cannot be read") from None
        for key, value in identity.items():
            if found.get(key) != value:
                why = f"{key} was {ascii(found.get(key))[:80]} and is {ascii(value)[:80]} now"
                if key == "source":
                    why = "the source is another one or has changed"
                raise self._foreign(folder, why)

    def _foreign(self, folder: Path, why: str) -> Usage:
        return Usage(
            f"{folder} holds a partial result of another job",
            why,
            "Choose another folder or remove this one",
        )

    def _write(self, content: bytes) -> None:
        with writing(self.path):
            while content:
                content = content[os.write(self._file, content) :]
            os.fsync(self._file)
