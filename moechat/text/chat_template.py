"""Conversations become token ids by the checkpoint's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import CheckpointDamaged, MoechatError, Usage
from moechat.messages import Parts, Turn
from moechat.text.control_tokens import ControlTokens
from moechat.text.prompt_length import refuse_if_too_long
from moechat.text.template_environment import (
    TemplateRefusal,
    compile_template,
    names_in_template,
)
from moechat.text.template_source import named_tokens, read_config, read_template
from moechat.text.text_guard import Generated, Joined, Literal, Marker, Piece, TextGuard
from moechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# Where templates look for what an assistant thought, as transformers' users name it.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_THOUGHT_ID, _ANSWER_ID = 2**32 - 2, 2**32 - 1  # stand for what was said; no tokens have them


class ChatTemplate:
    """A compiled chat template with its tokenizer.

    Ids of control tokens come from the template's own text, not from message text: see text_guard
    for how far that holds for a template that rewrites messages.
    """

    def __init__(
        self, source: str, origin: str, tokenizer: Tokenizer, variables: Mapping[str, str]
    ) -> None:
        """``origin``: the file, for messages. ``variables``: bos_token and the like."""
        self.source = source
        self._origin, self._tokenizer, self._variables = origin, tokenizer, variables
        self._control = ControlTokens(tokenizer, source)
        self._template = self._compile(source)

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template of a folder.

        Raises TextUnavailable when there is no template, CheckpointDamaged when it is broken.
        """
        config = read_config(folder)
        source, origin = read_template(folder, config)
        return cls(source, origin, tokenizer, named_tokens(config))

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of tokens that steer the model: never made from message text, never shown."""
        return self._control.ids

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template takes from its caller, "enable_thinking" for example."""
        return self._names[0]

    @cached_property
    def turn_end_id(self) -> int | None:
        """The control token that the template writes behind an answer, if it writes one.

        Found by rendering a talk of two turns. One that it also writes between the thinking and the
        answer ends parts of a turn, and is none.
        """
        parts = Parts((_THOUGHT_ID,), (_ANSWER_ID,))
        turns = [Turn("user", "a"), Turn("assistant", "", (_ANSWER_ID,), parts=parts)]
        try:
            ids = self.encode(turns, add_generation_prompt=False)
        except MoechatError:  # a template that wants more than that
            return None
        if _ANSWER_ID not in ids:
            return None
        answer_at = ids.index(_ANSWER_ID)
        thought_at = ids.index(_THOUGHT_ID) if _THOUGHT_ID in ids else answer_at
        after = ids[answer_at + 1 : answer_at + 2]
        is_end = after and after[0] in self._control.ids - set(ids[thought_at:answer_at])
        return after[0] if is_end else None

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        limit_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation. A turn with ids contributes exactly these.

        Of a turn with ``parts`` the template decides, as its vendor wrote it, whether the thinking
        is part of the talk; most drop it from all but the last answer. Raises PromptTooLong,
        without encoding it all, for text that surely has more than ``limit_tokens`` tokens; a
        result that is a little too long may be returned. Also Usage when the template refuses the
        conversation, CheckpointDamaged when it fails, InvalidUtf8.
        """
        return self.encode_messages(
            [self._message(turn) for turn in turns],
            limit_tokens=limit_tokens,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
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

    def _message(self, turn: Turn) -> dict[str, Any]:
        if turn.ids is None:
            return {"role": turn.role, "content": turn.text}
        if turn.parts is None:
            return {"role": turn.role, "content": Generated(tuple(turn.ids))}
        parts = turn.parts
        field = next((name for name in _REASONING_FIELDS if name in self._names[1]), None)
        if field is None:
            return {"role": turn.role, "content": _inline(parts, turn.ids)}
        answer = Joined((parts.lead.lstrip("\n"), Generated(parts.answer_ids)))
        message: dict[str, Any] = {"role": turn.role, "content": answer}
        if parts.reasoning_ids:
            message[field] = self._thought(parts.reasoning_ids)
        return message

    def _thought(self, ids: tuple[int, ...]) -> Joined:
        """Thinking whose first and last tokens are text where they hold its outer newlines.

        Templates strip these and write their own: then the tokens come out as they were.
        """
        before, after, begin, end = "", "", 0, len(ids)
        while begin < end and (text := self._tokenizer.decode([ids[begin]])).startswith("\n"):
            before, begin = before + text, begin + 1
        while begin < end and (text := self._tokenizer.decode([ids[end - 1]])).endswith("\n"):
            after, end = text + after, end - 1
        return Joined((before, Generated(ids[begin:end]), after))

    @cached_property
    def _names(self) -> tuple[frozenset[str], frozenset[str]]:
        try:
            return names_in_template(self.source)
        except Exception:  # it compiled, but jinja2 cannot tell
            return frozenset(), frozenset()

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


def _inline(parts: Parts, ids: Sequence[int]) -> Joined | Generated:
    """An answer as it was written, so that the template finds the tags if it looks for them."""
    if not parts.closing:
        return Generated(parts.answer_ids)
    # Thinking that was cut short gets its end: without it no template would know it as thinking.
    written = (Marker(parts.opening), Generated(parts.reasoning_ids), Marker(parts.closing))
    answer = (parts.lead, Generated(parts.answer_ids)) if parts.is_closed else ()
    return Joined((*written, *answer), Generated(tuple(ids)) if parts.is_closed else None)
