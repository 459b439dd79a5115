"""The chat: reads messages, shows answers, obeys slash commands and Ctrl-C."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moechat.errors import MoechatError, PromptTooLong, Usage
from moechat.events import Event, Finished, PrefillProgress, Queued
from moechat.folders import state_folder
from moechat.terminal.commands import parse_command, valid_commands
from moechat.terminal.editor import Editor
from moechat.terminal.interrupts import EXIT_INTERRUPTED, Interrupts
from moechat.terminal.neutralise import neutralise, one_line
from moechat.terminal.plain_printer import PlainPrinter
from moechat.terminal.progress import ProgressLine
from moechat.terminal.settings import RESET, Settings
from moechat.terminal.sinks import escapes_allowed, format_error, print_closing
from moechat.terminal.stats_text import stats_rows
from moechat.terminal.table import columns_of, table_lines
from moechat.terminal.thinking_printer import ThinkingPrinter
from moechat.terminal_size import fold_words

if TYPE_CHECKING:
    from moechat.engine.conversation import Conversation

SWITCHES = ("think", "reasoning_effort")  # of the conversation, not of the sampling
_EXAMPLES = '"What is the capital of Norway?", "Tell me a story about a fox." or "My name is Lily."'
_HINT = "[Ctrl-C again or Ctrl-D leaves; /help lists the commands]"


class Printer(Protocol):
    """Shows the text of one answer."""

    def write(self, text: str) -> None:
        """Show more of it."""

    def finish(self) -> None:
        """The answer is over."""


def run_chat(
    conversation: Conversation,
    settings: Settings,
    *,
    model_name: str,
    is_demo: bool,
    stats: str = "line",
    plain: bool = False,
    history: bool = True,
    switches: Mapping[str, str] | None = None,
    debug: bool = False,
) -> int:
    """Chat on the process's terminal until the user leaves; the exit code.

    ``stats`` is "none", "line" or "json"; ``plain`` shows answers as raw text; without ``history``
    nothing that is typed is written to disk. ``switches``: those of ``conversation`` that flags
    have set.
    """
    chat = Chat(
        conversation, settings, stats=stats, plain=plain, debug=debug, switches=switches or {}
    )
    editor = Editor(lambda: valid_commands(chat), _history_path() if history else None)
    chat.say(_welcome(model_name, is_demo))
    with chat.interrupts:
        while True:
            try:
                message = editor.read()
                if not_kept := editor.take_history_failure():
                    chat.say(fold_words(not_kept, sys.stderr))
                code = chat.obey(message)
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if chat.interrupts.is_second():
                    return EXIT_INTERRUPTED
                chat.say(fold_words(_HINT, sys.stderr))
            else:
                if code is not None:
                    return code


class Chat:
    """What slash commands act on: the conversation, its settings, and the terminal."""

    def __init__(
        self,
        conversation: Conversation,
        settings: Settings,
        *,
        stats: str,
        plain: bool,
        debug: bool,
        switches: Mapping[str, str],
    ) -> None:
        self.conversation, self.settings = conversation, settings
        self._flag_switches = switches
        self.interrupts = Interrupts()
        self._stats, self._debug = stats, debug
        self._plain = plain or not escapes_allowed(sys.stdout)
        self._last: Finished | None = None

    def say(self, text: str) -> None:
        """A line of the program's own, already harmless."""
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def say_table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows of the program's own, in columns."""
        self.say("\n".join(table_lines(rows, columns_of(sys.stderr), indent=2)))

    def set_value(self, name: str, text: str) -> None:
        """Set a sampling value or a switch for thinking as typed. Raises BadParameter, Usage."""
        name = name.replace("-", "_").lower()
        if name not in SWITCHES:
            self.settings.set_text(name, text)
        elif text == RESET:
            self.conversation.set_switch(name, self._flag_switches.get(name))
        else:
            self.conversation.set_switch(name, text)

    def describe_values(self) -> list[tuple[str, str, str]]:
        """All that set_value() can set as (name, value, origin)."""
        rows = self.settings.describe()
        for name, value in self.conversation.switches():
            origin = "flag" if value == self._flag_switches.get(name) else "set"
            rows.append((name, value or RESET, "model" if value is None else origin))
        return rows

    def say_stats(self) -> None:
        """The counters of the last answer and how full the context is."""
        rows = [] if self._last is None else stats_rows(self._last)
        used, limit = self.conversation.used_tokens, self.conversation.context_tokens
        self.say_table([*rows, ("context", f"{used} of {limit} tokens used")])

    def obey(self, text: str) -> int | None:
        """Send a message or run a command; an exit code when the chat is to end. Never raises."""
        try:
            if not text.strip():
                return None
            words = text.lstrip()
            if words.startswith("/") and not words.startswith("//"):
                command, argument = parse_command(words, self)
                return command.action(self, argument)
            message = words[1:] if words.startswith("//") else text
            self.answer(lambda: self.conversation.ask(message, self.settings.params()))
        except PromptTooLong as error:
            self._report(error, format_error(self._with_offers(error)))
        except MoechatError as error:
            self._report(error, format_error(error))
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}")
            self._report(error, f"internal error: {what} (run with --debug for the traceback)")
        return None

    def answer(self, start: Callable[[], Iterator[Event]]) -> None:
        """Show the events that ``start()`` gives; Ctrl-C cancels."""
        progress = ProgressLine(sys.stderr)
        finished, has_text = None, False
        thinking = ThinkingPrinter(sys.stdout, dim=not self._plain)
        with self.interrupts.turn(self.conversation.cancel):
            events = start()
            printer = self._printer()  # loads rich, while the engine works already
            try:
                for event in events:
                    # A Ctrl-C before there was anything to cancel is made good here.
                    if self.interrupts.cancelled and not isinstance(event, Finished):
                        self.conversation.cancel()
                    if isinstance(event, PrefillProgress | Queued):
                        progress.update(event)
                        continue
                    progress.erase()
                    thinking.write(event.reasoning)
                    if event.text:
                        thinking.finish()
                        printer.write(event.text)
                        has_text = True
                    if isinstance(event, Finished):
                        finished = event
            finally:
                progress.erase()
                thinking.finish()
                if has_text:
                    printer.finish()
        if finished is not None:
            self._close(finished, has_text)

    def _close(self, finished: Finished, has_text: bool) -> None:
        self._last = finished
        sys.stdout.flush()
        context_tokens = self.conversation.context_tokens
        print_closing(sys.stderr, finished, self._stats, context_tokens, has_text=has_text)
        if finished.finish_reason == "cancelled" and not finished.stats.decode_tokens:
            self.say("[nothing was said; the talk is as before]")

    def _printer(self) -> Printer:
        if self._plain:
            return PlainPrinter(sys.stdout)
        from moechat.terminal.markdown import MarkdownPrinter

        return MarkdownPrinter(sys.stdout)

    def _with_offers(self, error: PromptTooLong) -> PromptTooLong:
        offers = ["/clear", "/undo"] if self.conversation.turns else ["a shorter message"]
        limit, trained = self.conversation.context_tokens, self.conversation.trained_context_tokens
        if limit < trained:
            offers.append(f"a start with a larger --ctx (up to {trained})")
        return PromptTooLong(error.what, error.why, f"What helps: {' or '.join(offers)}")

    def _report(self, error: Exception, line: str) -> None:
        if self._debug:
            self.say(neutralise("".join(traceback.format_exception(error)).rstrip()))
        self.say(fold_words(line, sys.stderr))


def _history_path() -> Path | None:
    try:
        return state_folder() / "history"
    except Usage:  # no home folder: nothing to write to
        return None


def _welcome(model_name: str, is_demo: bool) -> str:
    name = one_line(model_name)
    if is_demo:
        start = f"{name} is a demonstration, too small to know much. Try {_EXAMPLES}"
    else:
        start = f"Chat with {name}."
    lines = (start, "/help lists the commands, Ctrl-D leaves.")
    return "\n".join(fold_words(line, sys.stderr) for line in lines)
