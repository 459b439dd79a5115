"""Which tokens begin a text and end an answer, as far as a GGUF file says.

Converters write one end token, but chat models end turns with others; the file's vocabulary is the
only other hint. So public tools know these tokens by name, and so does moechat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = (
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",  # Qwen, and whoever else uses ChatML
    "<|endoftext|>",
    "<|end|>",  # Phi
    "<|return|>",  # gpt-oss
    "<|call|>",
    "<end_of_turn>",  # Gemma
    "<eos>",
    "</s>",  # Llama 2, Mistral
    "[EOS]",  # Kimi K2
    "[EOT]",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
)  # fmt: skip
_CONTROL = 3


def bos_id(metadata: Mapping[str, Any], vocab_size: int) -> int | None:
    """The token that begins a text, if there is one."""
    value = metadata.get("tokenizer.ggml.bos_token_id")
    return value if type(value) is int and 0 <= value < vocab_size else None


def end_ids(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Tokens that end an answer: by the file's own keys, then by name among control tokens."""
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _KEYS]
    found = [value for value in ids if type(value) is int and 0 <= value < vocab_size]
    by_name = _control_tokens(metadata, vocab_size)
    if "<|return|>" in by_name and "<|call|>" in by_name:
        by_name.pop("<|end|>", None)  # gpt-oss: it ends a message, and the answer goes on
    return tuple(dict.fromkeys([*found, *by_name.values()]))


def _control_tokens(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Ids of those of _NAMES that are control tokens; elsewhere "</s>" may be a tag of HTML."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type")
    found: dict[str, int] = {}
    if not isinstance(tokens, Sequence) or not isinstance(types, np.ndarray):
        return found
    for name in _NAMES:
        try:
            token_id = tokens.index(name)
        except ValueError:
            continue
        if token_id < min(len(types), vocab_size) and types[token_id] == _CONTROL:
            found[name] = token_id
    return found
