"""Conversations become token ids by the checkpoint's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import CheckpointDamaged, TextUnavailable, Usage
from moechat.json_file import read_json_object
from moechat.messages import Turn
from moechat.text.control_tokens import ControlTokens
from moechat.text.prompt_length import refuse_if_too_long
from moechat.text.template_environment import TemplateRefusal, compile_template
from moechat.text.text_guard import Generated, Literal, Piece, TextGuard
from moechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
_LIMIT_BYTES = 16_000_000  # of either file
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ChatTemplate:
    """A compiled chat template with its tokenizer.

    No id of a control token comes from message text, only from the template's own text.
    """

    def __init__(
        self, source: str, origin: Path, tokenizer: Tokenizer, variables: dict[str, str]
    ) -> None:
        self._origin, self._tokenizer, self._variables = origin, tokenizer, variables
        self._control = ControlTokens(tokenizer, source)
        self._template = self._compile(source)

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read chat_template.jinja or else tokenizer_config.json.

        Raises TextUnavailable when there is no template, CheckpointDamaged when it is broken.
        """
        config_path, template_path = folder / CONFIG_NAME, folder / TEMPLATE_NAME
        config = read_json_object(config_path, _LIMIT_BYTES) if config_path.exists() else {}
        variables = {}
        for name in (f"{token}_token" for token in _NAMED_TOKENS):
            value = config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                variables[name] = value
        if template_path.is_file():
            return cls(_read_text(template_path), template_path, tokenizer, variables)
        source = _configured_template(config.get("chat_template"))
        if source is None:
            raise TextUnavailable(
                f"{folder} has no chat template",
                f"neither {CONFIG_NAME} nor {TEMPLATE_NAME} holds one",
            )
        return cls(source, config_path, tokenizer, variables)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of tokens that steer the model: never made from message text, never shown."""
        return self._control.ids

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        limit_tokens: int | None = None,
    ) -> list[int]:
        """Ids of a conversation. A turn with ids contributes exactly these.

        Raises PromptTooLong, without encoding it all, for text that surely has more than
        ``limit_tokens`` tokens; a result that is a little too long may be returned. Also Usage when
        the template refuses the conversation, CheckpointDamaged when it fails, InvalidUtf8.
        """
        messages = [
            {
                "role": turn.role,
                "content": turn.text if turn.ids is None else Generated(tuple(turn.ids)),
            }
            for turn in turns
        ]
        return self.encode_messages(
            messages, limit_tokens=limit_tokens, add_generation_prompt=add_generation_prompt
        )

    def encode_messages(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        limit_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of messages in the form that templates expect, with tools and template variables.

        Raises as encode() does.
        """
        values = {"documents": None, **variables, "messages": messages, "tools": tools}
        try:
            guard = TextGuard(values, self._control)
            marked = guard.mark(values)
        except RecursionError:
            raise Usage("the messages cannot be used", "they are nested too deeply") from None
        rendered = self._render(marked, guard)
        if limit_tokens is not None:
            pieces = guard.pieces(rendered)
            refuse_if_too_long(self._tokenizer, self._control, pieces, len(rendered), limit_tokens)
        ids: list[int] = []
        for index, piece in enumerate(guard.pieces(rendered)):
            ids += self._encode_piece(piece, is_first=index == 0)
        return ids

    def _encode_piece(self, piece: Piece, is_first: bool) -> list[int]:
        if isinstance(piece, Generated):
            return list(piece.ids)
        if isinstance(piece, Literal):
            encode, text = self._control.encode_as_text, piece.text
        else:
            encode, text = self._control.encode, piece
        if not is_first:
            # Some tokenizers put a space before the first word of a text: encode behind a newline
            # and drop its ids again.
            newline = encode("\n")
            ids = encode("\n" + text)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return encode(text)

    def _render(self, values: dict[str, Any], guard: TextGuard) -> str:
        try:
            return self._template.render({**self._variables, **values})
        except TemplateRefusal as refusal:
            why = guard.without_marks(str(refusal))
            raise Usage("the model's chat template refuses this conversation", why) from None
        except Exception as error:  # whatever the template's code runs into
            why = guard.without_marks(f"{type(error).__name__}: {error}")
            raise self._damaged("fails", why) from None

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return compile_template(source)
        except Exception as error:  # a syntax error, a recursion limit, a bad escape
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise self._damaged("cannot be read", f"{error}{where}") from None

    def _damaged(self, what: str, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"the chat template in {self._origin} {what}", why)


def _configured_template(value: Any) -> str | None:
    """The template in tokenizer_config.json: a string, or the default of several named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry for entry in value if isinstance(entry, dict)}
        value = named.get("default", {}).get("template")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LIMIT_BYTES + 1)
        if len(content) <= _LIMIT_BYTES:
            return content.decode("utf-8")
        why = f"it is larger than {_LIMIT_BYTES} bytes"
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    raise CheckpointDamaged(f"{path} cannot be used", why, "Download it again")
