"""The slash commands: one table that feeds help, completion and validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat.errors import Usage
from moechat.terminal.neutralise import neutralise

if TYPE_CHECKING:
    from moechat.terminal.repl import Chat


@dataclass(frozen=True)
class Command:
    """One slash command. ``argument`` is "" (none) or "[NAME]" (optional).

    One that ``needs_turns`` is valid only in a talk that has begun. ``action(chat, argument)``
    returns an exit code to leave the chat, else None.
    """

    name: str
    argument: str
    help: str
    action: Callable[[Chat, str], int | None]
    needs_turns: bool = False

    def is_valid(self, chat: Chat) -> bool:
        """Whether it can be given now."""
        return not self.needs_turns or bool(chat.conversation.turns)


# What users of other tools type.
_ALIASES = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}


def valid_commands(chat: Chat) -> list[tuple[str, str]]:
    """Names and help of what can be given now."""
    return [(command.name, command.help) for command in COMMANDS if command.is_valid(chat)]


def parse_command(line: str, chat: Chat) -> tuple[Command, str]:
    """The command and argument of a line that starts with a slash. Raises Usage."""
    name, *rest = line.split(maxsplit=1)
    name = _ALIASES.get(name, name)
    argument = rest[0].rstrip() if rest else ""
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise Usage(
            f"there is no command {name[:40]!a}",
            next_step=f"/help lists them; /{name[:40]} sends the text",
        )
    if argument and not command.argument:
        raise Usage(f"{name} takes no argument")
    if not command.is_valid(chat):
        raise Usage(f"{name} needs a message first", "the talk is empty")
    return command, argument


def _help(chat: Chat, argument: str) -> None:
    rows = [(f"{command.name} {command.argument}".rstrip(), command.help) for command in COMMANDS]
    rows += [
        ("//text", "send a message that starts with a slash"),
        ("Enter", "send; Alt-Enter or Ctrl-J: new line"),
        ("Ctrl-R", "search what was typed before; Tab: complete a command"),
        ("Ctrl-C", "stop the answer, or clear the line; twice: leave at once"),
        ("Ctrl-D", "leave"),
    ]
    chat.say_table(rows)


def _exit(chat: Chat, argument: str) -> int:
    return 0


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    kept = "; the system text stays" if chat.conversation.system else ""
    chat.say(f"[the talk is forgotten{kept}]")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_system("" if argument == "none" else argument)
    text = chat.conversation.system
    chat.say(f"system: {neutralise(text)}" if text else "[there is no system text]")


def _set(chat: Chat, argument: str) -> None:
    if argument:
        name, *value = argument.split(maxsplit=1)
        if not value:
            raise Usage("a setting needs a name and a value", next_step="/set alone shows them all")
        chat.set_value(name, value[0])
        known = name.replace("-", "_").lower()
        rows = [row for row in chat.describe_values() if row[0] == known]
    else:
        rows = chat.describe_values()
    chat.say_table(rows)


def _stats(chat: Chat, argument: str) -> None:
    chat.say_stats()


def _regen(chat: Chat, argument: str) -> None:
    chat.answer(lambda: chat.conversation.regenerate(chat.settings.params()))


def _undo(chat: Chat, argument: str) -> None:
    if not chat.conversation.undo():
        raise Usage("there is nothing to undo")
    chat.say("[the last message and its answer are forgotten]")


COMMANDS = (
    Command("/help", "", "list commands and keys", _help),
    Command("/exit", "", "leave", _exit),
    Command("/clear", "", "forget the talk; the system text stays", _clear),
    Command("/system", "[TEXT]", "show or set the system text; none removes it", _system),
    Command(
        "/set",
        "[NAME VALUE]",
        "change a value (default: as at start); alone: show all",
        _set,
    ),
    Command("/stats", "", "counters of the last answer and of the context", _stats),
    Command("/regen", "", "answer the last message again", _regen, needs_turns=True),
    Command("/undo", "", "forget the last message and its answer", _undo, needs_turns=True),
)
