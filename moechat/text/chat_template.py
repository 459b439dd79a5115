"""The checkpoint's own chat template: turns of a conversation become token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import CheckpointDamaged, TextUnavailable, Usage
from moechat.messages import Turn
from moechat.text.limited_encode import encode_pieces, fewest_tokens, too_long
from moechat.text.markers import ControlStrings, Markers
from moechat.text.tokenizer import CONFIG_FILE, Tokenizer

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_LIMIT_BYTES = 4 << 20
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """Chat template of one model. Immutable once open.

    ``control_ids``: ids of added tokens that no message text may produce and no answer may show.
    """

    def __init__(self, source: str, name: str, tokenizer: Tokenizer) -> None:
        from moechat.text.sandbox import compile_template

        self._name = name
        self._tokenizer = tokenizer
        self._template: jinja2.Template = compile_template(source, name)
        self._named_tokens = _named_tokens(tokenizer.config)
        named = set(self._named_tokens.values())
        control = [
            token
            for token in tokenizer.added.values()
            if token.special
            or token.content in named
            or (token.content.strip() and token.content in source)
        ]
        self.control_ids = frozenset(token.token_id for token in control)
        self._strings = ControlStrings(tokenizer.added, [token.content for token in control])

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template in tokenizer_config.json or chat_template.jinja of ``folder``.

        Raises TextUnavailable when there is none, CheckpointDamaged naming the file.
        """
        value = tokenizer.config.get("chat_template")
        if value is not None:
            path = folder / CONFIG_FILE
            return cls(_chosen_source(value, path), f"chat_template in {path}", tokenizer)
        path = folder / TEMPLATE_FILE
        if not path.exists():
            raise TextUnavailable(f"{folder} has no chat template", f"{TEMPLATE_FILE} is missing")
        return cls(_read_source(path), str(path), tokenizer)

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        limit_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; a turn with ``ids`` contributes exactly these.

        Raises PromptTooLong for text that cannot fit ``limit_tokens``, without encoding it whole;
        Usage when the template refuses the turns; InvalidUtf8.
        """
        if limit_tokens is not None:
            # Before any copy of the text is made. Every template writes what the user said.
            said = [turn.text for turn in turns if turn.role == "user" and turn.ids is None]
            fewest = sum(fewest_tokens(self._tokenizer, text) for text in said)
            if fewest > limit_tokens:
                raise too_long(fewest, limit_tokens)
        markers = Markers(self._strings)
        messages = [
            {
                "role": turn.role,
                "content": markers.protect(turn.text, "content")
                if turn.ids is None
                else markers.mark(turn.ids),
            }
            for turn in turns
        ]
        return self._encode(
            markers, messages, limit_tokens, {"add_generation_prompt": add_generation_prompt}
        )

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        limit_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of messages as templates know them; ``variables`` are seen by the template.

        Raises as ``encode`` does.
        """
        markers = Markers(self._strings)
        try:
            protected = [markers.protect(message) for message in messages]
            extra = {name: markers.protect(value, name) for name, value in variables.items()}
        except RecursionError:
            raise Usage("the messages cannot be used", "they are nested too deeply") from None
        extra["add_generation_prompt"] = add_generation_prompt
        return self._encode(markers, protected, limit_tokens, extra)

    def _encode(
        self,
        markers: Markers,
        messages: Sequence[object],
        limit_tokens: int | None,
        variables: Mapping[str, object],
    ) -> list[int]:
        from moechat.text.sandbox import render

        context = {"tools": None, **self._named_tokens, **variables, "messages": messages}
        prompt = render(self._template, context, self._name, markers.reveal)
        return encode_pieces(self._tokenizer, lambda: markers.pieces(prompt), limit_tokens)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, as templates name them."""
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _chosen_source(value: object, path: Path) -> str:
    """The template, or the one named "default" of several."""
    if isinstance(value, str):
        return value
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict) and entry.get("name") == "default":
            source = entry.get("template")
            if isinstance(source, str):
                return source
    raise CheckpointDamaged(
        f"{path} cannot be used", 'chat_template is neither a text nor a list with a "default"'
    )


def _read_source(path: Path) -> str:
    what = f"{path} cannot be used"
    if not path.is_file():
        raise CheckpointDamaged(what, "it is not a file")
    try:
        with path.open("rb") as file:
            source = file.read(_TEMPLATE_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointDamaged(what, f"it cannot be read ({error.strerror})") from None
    if len(source) > _TEMPLATE_LIMIT_BYTES:
        raise CheckpointDamaged(what, f"it is larger than {_TEMPLATE_LIMIT_BYTES} bytes")
    try:
        return source.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointDamaged(what, "it is not UTF-8", "Download it again") from None
