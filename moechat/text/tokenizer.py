"""The tokenizer of a model folder, behind the few calls that moechat needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import CheckpointDamaged, InvalidUtf8, TextUnavailable, Usage
from moechat.json_file import foreign_content

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
_OTHER_NAMES = ("tokenizer.model", "tekken.json")  # SentencePiece's and Mistral's own formats
# The decoder of SentencePiece vocabularies, in the library's words.
_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_BYTES, _FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True)
class ByteFallback:
    """Tokens spell text with ``▁`` for a blank, or one byte as ``<0x0A>``."""

    strips_first_space: bool


class Tokenizer:
    """tokenizer.json by the `tokenizers` library. Encoding never adds a token of its own."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        # Settings of training time; with them the library would cut or fill a prompt silently.
        library.no_truncation()
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: id_ for id_, token in added.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Read the folder's tokenizer.json. Raises TextUnavailable or CheckpointDamaged."""
        path = folder / FILE_NAME
        if not path.is_file():  # a pipe of this name would block
            others = " and ".join(name for name in _OTHER_NAMES if (folder / name).is_file())
            hint = f"Of {others} another program can make one" if others else ""
            raise TextUnavailable(
                f"{folder} has no {FILE_NAME}", "text cannot become token ids", hint
            )
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more precise
            with path.open("rb") as file:
                why = foreign_content(file.read(512)) or str(error)
            raise CheckpointDamaged(f"{path} cannot be used", why, "Download it again") from None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the added ones included; a model's embedding may have more rows."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_id(self, content: str) -> int | None:
        """The id of one token as the file spells it."""
        return self._library.token_to_id(content)

    def token(self, token_id: int) -> str | None:
        """One token as the file spells it; None for an id that stands for nothing."""
        return self._library.id_to_token(token_id)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: the spelling of an added token is text like any other.

        Raises InvalidUtf8 for lone surrogates.
        """
        return _encode(self._plain, text)

    def encode_with_added_tokens(self, text: str) -> list[int]:
        """Ids of text that a template wrote: the spelling of an added token becomes its id."""
        return _encode(self._library, text)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Raises CheckpointDamaged."""
        try:
            return self._library.decode(ids, skip_special_tokens=skip_special) if ids else ""
        except BaseException as error:  # a decoder that does not fit the vocabulary
            why = _panic(error)
        raise CheckpointDamaged("the tokenizer cannot turn tokens into text", why)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token is a string of bytes in the GPT-2 alphabet and nothing else."""
        return _state(self._library.decoder).get("type") == "ByteLevel"

    @cached_property
    def byte_fallback(self) -> ByteFallback | None:
        """How tokens of a SentencePiece vocabulary with byte tokens spell text; None for others."""
        state = _state(self._library.decoder)
        decoders = state.get("decoders") if state.get("type") == "Sequence" else None
        if not isinstance(decoders, list) or decoders[:3] != [_REPLACE, _BYTES, _FUSE]:
            return None
        if decoders[3:] not in ([], [_STRIP]):
            return None
        return ByteFallback(strips_first_space=decoders[3:] == [_STRIP])

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """No token stands for more bytes of text; None where there is no such bound."""
        state = _state(self._library.normalizer)
        if not self.is_byte_level or (state and state.get("normalizers") != []):
            return None  # a normaliser may shrink text, an unknown token may swallow it
        return max(len(token.encode()) for token in self._library.get_vocab())

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same model without added tokens; shares the vocabulary."""
        import tokenizers

        plain = tokenizers.Tokenizer(self._library.model)
        if self._library.normalizer is not None:
            plain.normalizer = self._library.normalizer
        if self._library.pre_tokenizer is not None:
            plain.pre_tokenizer = self._library.pre_tokenizer
        return plain


def check_encodable(text: str) -> None:
    """Raises InvalidUtf8 when ``text`` holds lone surrogates, which no UTF-8 text can."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidUtf8(
            "the text is not valid Unicode",
            f"a lone surrogate, {ord(text[error.start]):#06x}, at character {error.start}",
        ) from None


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    check_encodable(text)
    try:
        return library.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        # The library panics where its pattern matcher gives up, as at ten million spaces in a row.
        why = _panic(error)
    raise Usage("the tokenizer cannot take this text", why)


def _panic(error: BaseException) -> str:
    """The message of a library's panic, which is no Exception. Any other error is raised again."""
    if type(error).__name__ != "PanicException":
        raise error
    return str(error)


def _state(component: Any) -> dict[str, Any]:
    """A library component's settings as tokenizer.json writes them; {} for None."""
    if component is None:
        return {}
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state
