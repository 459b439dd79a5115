"""The line editor of the chat: keys, paste, history and completion, by prompt_toolkit."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moechat.terminal.neutralise import one_line

PROMPT = "> "
CONTINUATION = "  "
_SURROGATE = re.compile("[\ud800-\udfff]")


class Editor:
    """Reads messages.

    ``commands`` tells which commands to complete, as names with a help text. ``history_path`` None
    keeps what was typed in memory only.
    """

    def __init__(
        self, commands: Callable[[], Iterable[tuple[str, str]]], history_path: Path | None
    ) -> None:
        from prompt_toolkit import PromptSession

        self._history = _history(history_path)
        self._has_told = False
        self._session: Any = PromptSession(
            PROMPT,
            multiline=True,  # Enter is bound below: this only lets newlines into the text
            prompt_continuation=CONTINUATION,
            key_bindings=_bindings(),
            history=self._history,
            completer=_completer(commands),
            complete_while_typing=False,
            enable_suspend=True,
            output=_output(),
        )

    def read(self) -> str:
        """The next message, its line ends LF.

        Raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D, both on an empty line.
        """
        return _clean(self._session.prompt())

    def take_history_failure(self) -> str:
        """Why what was typed cannot be kept, and what helps; told once, "" otherwise."""
        failure: OSError | None = getattr(self._history, "failure", None)
        if failure is None or self._has_told:
            return ""
        self._has_told = True
        why = f"{self._history.filename} cannot be used ({failure.strerror or failure})"
        return one_line(
            f"[what you type is not kept for the next chat: {why}. Make it writable, set "
            "MOECHAT_HOME to another folder, or start with --no-history.]"
        )


def _output() -> Any:
    """A terminal that is never asked for its cursor position, which not all answer in time."""
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.utils import is_dumb_terminal

    if is_dumb_terminal():
        return None  # prompt_toolkit has a mode of its own for these
    output = Vt100_Output.from_pty(
        sys.stdout, term=os.environ.get("TERM"), default_color_depth=ColorDepth.from_env()
    )
    output.enable_cpr = False
    return output


def _bindings() -> Any:
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition, is_searching
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.utils import is_dumb_terminal

    bindings = KeyBindings()
    editing = ~is_searching
    is_empty = Condition(lambda: not get_app().current_buffer.text)

    @bindings.add("enter", filter=editing)
    def send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=editing)
    @bindings.add("c-j", filter=editing)
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=editing)
    @bindings.add("<sigint>")
    def interrupt(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    @bindings.add("c-d", filter=editing & is_empty)
    def leave(event: Any) -> None:
        event.app.exit(exception=EOFError(), style="class:exiting")

    # There the library shows typed letters only: what these bring would be sent unseen.
    for keys in ("up", "down", "c-p", "c-n", "c-r", "c-s", "tab"):

        @bindings.add(keys, filter=Condition(is_dumb_terminal))
        def ignore(event: Any) -> None:
            pass

    return bindings


def _history(path: Path | None) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()

    history_file, folder = path, path.parent

    class SafeHistory(FileHistory):
        """A history file that may fail to be read or written: then it is forgotten at the end.

        ``failure`` is what the last attempt met.
        """

        failure: OSError | None = None

        def load_history_strings(self) -> Iterable[str]:
            try:
                return list(super().load_history_strings())
            except OSError as error:
                self.failure = error
                return []

        def store_string(self, string: str) -> None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                history_file.touch(mode=0o600)
                super().store_string(_clean(string))
            except OSError as error:
                self.failure = error

    return SafeHistory(str(history_file))


def _completer(commands: Callable[[], Iterable[tuple[str, str]]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Commands(Completer):
        """Completes a command name at the start of the text."""

        def get_completions(self, document: Any, complete_event: Any) -> Iterable[Any]:
            typed = document.text_before_cursor
            if typed.startswith("/"):
                for name, help_text in commands():
                    if name.startswith(typed):
                        yield Completion(name, -len(typed), display_meta=help_text)

    return Commands()


def _clean(text: str) -> str:
    """LF line ends; bytes that were no UTF-8, which arrive as lone surrogates, become U+FFFD."""
    return _SURROGATE.sub("�", text.replace("\r\n", "\n").replace("\r", "\n"))
