"""The tokenizer in a GGUF file's metadata, as the `tokenizers` library's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged, MoechatError, TextUnavailable
from moechat.text.gguf_merges import merges_by_score
from moechat.text.gguf_pre_tokenizers import SPLITTINGS

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = ("gpt2", "llama")  # byte-level BPE, SentencePiece
_SPACE = "\u2581"  # what SentencePiece writes for a space
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so the format spells it
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_NEEDED = ("bos_token", "eos_token", "unk_token")  # old converters wrote -1 for "none" in others
_TEMPLATE_KEY = "tokenizer.chat_template"
_AGAIN = "Download the file again"


def build_tokenizer(
    metadata: Mapping[str, Any], path: Path, cache_folder: Path | None = None
) -> tokenizers.Tokenizer:
    """The tokenizer, with added tokens and without post-processing.

    ``path`` names the file in messages. ``cache_folder``: where what takes long to derive is kept.
    Raises TextUnavailable when the file has no tokenizer or one that moechat does not know,
    CheckpointDamaged.
    """
    kind = metadata.get(f"{_PREFIX}model")
    if not isinstance(kind, str) or f"{_PREFIX}tokens" not in metadata:
        raise TextUnavailable(f"{path} has no tokenizer", "its metadata hold no vocabulary")
    if kind not in _KINDS:
        raise TextUnavailable(
            f"{path} has a tokenizer that moechat does not know",
            f"its {_PREFIX}model is {ascii(kind)[:80]}; known are {' and '.join(_KINDS)}",
        )
    try:
        vocabulary = _Vocabulary(metadata)
        if kind == "gpt2":
            library = _byte_level(metadata, vocabulary, path)
        else:
            library = _sentence_piece(metadata, vocabulary, path, cache_folder)
        _add_tokens(library, vocabulary)
        return library
    except MoechatError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise _damaged(path, str(error)[:300]) from None


def tokenizer_config(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a tokenizer_config.json would say: chat_template, bos_token, eos_token, ...

    ``path`` names the file in messages. Raises CheckpointDamaged.
    """
    config: dict[str, Any] = {}
    tokens = metadata.get(f"{_PREFIX}tokens")
    tokens = tokens if isinstance(tokens, Sequence) else ()
    for name, key in _NAMED_TOKENS.items():
        token_id = metadata.get(_PREFIX + key)
        if type(token_id) is int and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
        elif token_id is not None and name in _NEEDED:
            why = f"its {_PREFIX}{key} is {ascii(token_id)[:80]}, and it has {len(tokens)} tokens"
            raise _damaged(path, why)
    template = chat_template(metadata, path)
    if template is not None:
        config["chat_template"] = template
    return config


def chat_template(metadata: Mapping[str, Any], path: Path) -> str | None:
    """The chat template, if there is one. Raises CheckpointDamaged when it is no text."""
    template = metadata.get(_TEMPLATE_KEY)
    if template is None or isinstance(template, str):
        return template
    raise CheckpointDamaged(f"{path} cannot be used", f"its {_TEMPLATE_KEY} is no string", _AGAIN)


def _damaged(path: Path, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"the tokenizer in {path} cannot be used", why, _AGAIN)


class _Vocabulary:
    """Tokens, types and scores by id. ValueError when they do not fit together."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens = _strings(metadata, "tokens")
        # Without types no token would be a control token, and every marker of a template text.
        self.types = _numbers(metadata, "token_type", len(self.tokens), "iu")
        if not np.isin(self.types, range(_NORMAL, _BYTE + 1)).all():
            raise ValueError(f"{_PREFIX}token_type has codes that are none of 1 to {_BYTE}")
        self.scores = np.zeros(len(self.tokens), np.float32)
        if f"{_PREFIX}scores" in metadata:
            self.scores = _numbers(metadata, "scores", len(self.tokens), "f").astype(np.float32)
        if not np.isfinite(self.scores).all():
            raise ValueError(f"{_PREFIX}scores has values that are no finite numbers")

    def ids_of(self, *types: int) -> list[int]:
        """Ids of the tokens of these types."""
        found: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return found

    def ids(self) -> dict[str, int]:
        """Id by token. Unused ones, which only fill the embedding up, are left out."""
        ids = dict(zip(self.tokens, range(len(self.tokens))))
        if len(ids) != len(self.tokens):
            raise ValueError("its vocabulary has tokens that are spelled alike")
        for token_id in self.ids_of(_UNUSED):
            del ids[self.tokens[token_id]]
        return ids


def _byte_level(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, path: Path
) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models

    name = metadata.get(f"{_PREFIX}pre", "default")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise TextUnavailable(
            f"{path} splits text in a way that moechat does not know",
            f"its {_PREFIX}pre is {ascii(name)[:80]}; known are {', '.join(sorted(SPLITTINGS))}",
        )
    merges = _strings(metadata, "merges")
    # Tokens hold no space, so that this is each merge cut at its only one.
    flat = " ".join(merges).split(" ") if merges else []
    if len(flat) != 2 * len(merges):
        raise ValueError("its merges are not pairs of tokens")
    model = models.BPE(
        vocabulary.ids(), list(zip(flat[::2], flat[1::2])), ignore_merges=splitting.whole_words
    )
    library = tokenizers.Tokenizer(model)
    normalizer = splitting.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = splitting.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library


def _sentence_piece(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, path: Path, cache_folder: Path | None
) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    for token_id in vocabulary.ids_of(_USER_DEFINED):
        # Converters write these as they are in text, and give them a score below all others;
        # SentencePiece takes them before anything else.
        vocabulary.tokens[token_id] = vocabulary.tokens[token_id].replace(" ", _SPACE)
        vocabulary.scores[token_id] = 0.0
    merges = merges_by_score(vocabulary.tokens, vocabulary.scores, cache_folder)
    unknown = tokenizer_config(metadata, path).get("unk_token")
    model = models.BPE(
        vocabulary.ids(),
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    library = tokenizers.Tokenizer(model)
    prefix_space = metadata.get(f"{_PREFIX}add_space_prefix", True)
    if not isinstance(prefix_space, bool):
        raise ValueError(f"{_PREFIX}add_space_prefix is neither true nor false")
    replace: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    if prefix_space:
        replace = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
    library.normalizer = replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    return library


def _add_tokens(library: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    special = vocabulary.ids_of(_UNKNOWN, _CONTROL)
    library.add_special_tokens(
        [AddedToken(vocabulary.tokens[id_], normalized=False, special=True) for id_ in special]
    )
    library.add_tokens(
        [
            AddedToken(vocabulary.tokens[id_], normalized=False)
            for id_ in vocabulary.ids_of(_USER_DEFINED)
        ]
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{_PREFIX}{key} is no array of strings")
    return list(value)


def _numbers(metadata: Mapping[str, Any], key: str, length: int, kinds: str) -> NDArray[Any]:
    """An array of numpy's type ``kinds``: "iu" integers, "f" floating point."""
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, np.ndarray) or len(value) != length or value.dtype.kind not in kinds:
        what = "numbers" if kinds == "f" else "integers"
        raise ValueError(f"{_PREFIX}{key} is no array of {length} {what}")
    copy: NDArray[Any] = value.copy()
    return copy
