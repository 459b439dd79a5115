"""A model folder's tokenizer: text to token ids that can hold no control token, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import CheckpointDamaged, InvalidUtf8, TextUnavailable
from moechat.models.json_file import read_json_object
from moechat.text.added_tokens import AddedToken, read_added_tokens
from moechat.text.byte_level import is_byte_level, token_to_bytes

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_TOKENIZER_LIMIT_BYTES = 256 << 20
_CONFIG_LIMIT_BYTES = 32 << 20
# No text leads to this before a name: pre-tokenizers cut there, and byte-level text has no NUL.
_UNREACHABLE = "\0\n\0"


class Tokenizer:
    """Tokenizer of one model. Immutable once open.

    ``added``: added tokens by content; ``added_tokens``: their ids by content; ``special_ids``:
    ids of those flagged special; ``config``: tokenizer_config.json; ``byte_level``: every token
    is a string of bytes.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        added: Mapping[str, AddedToken],
        config: Mapping[str, Any],
        description: Mapping[str, Any],
    ) -> None:
        self._library = library
        self.added = dict(added)
        self.config = dict(config)
        self.added_tokens = {content: token.token_id for content, token in added.items()}
        self.special_ids = frozenset(t.token_id for t in added.values() if t.special)
        self._content_of = {token.token_id: token.content for token in added.values()}
        self.byte_level = is_byte_level(description.get("decoder"))
        normalizer = description.get("normalizer")
        # A normaliser may shrink text, and then bytes say nothing about tokens.
        self._keeps_bytes = self.byte_level and (
            not normalizer or normalizer == {"type": "Sequence", "normalizers": []}
        )

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json of ``folder``.

        Raises TextUnavailable when one is missing, CheckpointDamaged naming the file.
        """
        for name in (TOKENIZER_FILE, CONFIG_FILE):
            if not (folder / name).exists():
                raise TextUnavailable(f"{folder} has no {name}", "text cannot become token ids")
        path = folder / TOKENIZER_FILE
        description = read_json_object(path, _TOKENIZER_LIMIT_BYTES)
        config = read_json_object(folder / CONFIG_FILE, _CONFIG_LIMIT_BYTES)
        try:
            added = read_added_tokens(description.get("added_tokens"))
            library = _load_without_added_tokens(description, added)
        except ValueError as error:
            raise CheckpointDamaged(
                f"{path} cannot be used", str(error), "Download it again"
            ) from None
        return cls(library, added, config, description)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` as plain text: no id of an added token can result.

        Raises InvalidUtf8 for a lone surrogate.
        """
        check_encodable(text)
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; U+FFFD for bytes that are not UTF-8, nothing for unknown ids."""
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        if self.byte_level:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        names = [name for i in kept if (name := self._name(i)) is not None]
        decoder = self._library.decoder
        return " ".join(names) if decoder is None else str(decoder.decode(names))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for (byte-level tokenizers only); b"" for an unknown id."""
        added = self._content_of.get(token_id)
        if added is not None:
            return added.encode("utf-8", "replace")
        name = self._name(token_id)
        return b"" if name is None else token_to_bytes(name)

    def token_id(self, content: str) -> int | None:
        """The id of a token by its content; added tokens first."""
        added = self.added_tokens.get(content)
        if added is not None:
            return added
        found: int | None = self._library.token_to_id(content)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(max(self._library.get_vocab().values(), default=-1), *self._content_of, -1) + 1

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most UTF-8 bytes of text that one id can stand for; None when unknown."""
        if not self._keeps_bytes:
            return None
        added = (len(content.encode("utf-8", "replace")) for content in self.added_tokens)
        # In byte-level vocabularies every character of a name is one byte.
        return max(max(map(len, self._library.get_vocab()), default=1), *added, 1)

    def _name(self, token_id: int) -> str | None:
        added = self._content_of.get(token_id)
        if added is not None or not 0 <= token_id < 1 << 32:
            return added
        name: str | None = self._library.id_to_token(token_id)
        return name


def check_encodable(text: str) -> None:
    """Raise InvalidUtf8 when ``text`` holds a lone surrogate."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidUtf8(
            "the text is not valid Unicode", f"character {error.start} is a lone surrogate"
        ) from None


def _load_without_added_tokens(
    description: Mapping[str, Any], added: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    """The library's tokenizer for plain text. ValueError: the library refuses it.

    Added tokens are taken out, for the library would find them in any text. Their names are taken
    out of the model's own vocabulary too, where a whole word may be looked up.
    """
    import json

    import tokenizers

    model = description.get("model")
    if not isinstance(model, dict):
        raise ValueError("it has no model")
    plain = {
        **description,
        "added_tokens": [],
        "model": _hide_added(model, added),
        # Nothing is ever added, cut or filled; the first may name added tokens.
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in the library is no Exception
        raise ValueError(f"the tokenizers library refuses it ({str(error)[:200]})") from None


def _hide_added(model: dict[str, Any], added: Mapping[str, AddedToken]) -> dict[str, Any]:
    """``model`` with the names of added tokens in its vocabulary made unreachable by any text."""
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict):
        return model
    hidden = {name for name in added if name in vocab}
    if not hidden:
        return model
    model = {**model, "vocab": {_hidden_name(name, hidden): i for name, i in vocab.items()}}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _hidden_name(model["unk_token"], hidden)
    if isinstance(merges, list):
        model["merges"] = [m for m in merges if hidden.isdisjoint(_merge_names(m))]
    return model


def _hidden_name(name: str, hidden: set[str]) -> str:
    return _UNREACHABLE + name if name in hidden else name


def _merge_names(merge: object) -> tuple[str, ...]:
    """The two parts of a merge (["a", "b"] or "a b") and what it makes."""
    parts = merge.split(" ", 1) if isinstance(merge, str) else merge
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return ()  # the library will say what is wrong with it
    return (*parts, "".join(parts))
