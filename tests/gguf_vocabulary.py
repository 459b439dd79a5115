"""The tokenizer metadata that a GGUF file of a Hugging Face tokenizer has, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."


def byte_level_metadata(tokenizer_json: dict[str, Any], pre: str) -> dict[str, Any]:
    """Of a byte-level tokenizer.json; ids that stand for nothing get placeholders."""
    tokens, types = _vocabulary(tokenizer_json)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer_json["model"]["merges"]
    ]
    return metadata("gpt2", tokens, types, pre=pre, merges=merges)


def sentence_piece_metadata(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    """Of a tokenizer.json that was made from a SentencePiece model: scores in place of merges."""
    tokens, types = _vocabulary(tokenizer_json)
    scores = np.zeros(len(tokens), np.float32)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for rank, (left, right) in enumerate(tokenizer_json["model"]["merges"]):
        merged = ids[left + right]
        scores[merged] = scores[merged] or -1.0 - rank
    for token_id, token in enumerate(tokens):
        if token.startswith("<0x") and len(token) == 6:
            types[token_id] = BYTE
    unknown = tokens.index(tokenizer_json["model"]["unk_token"])
    return metadata("llama", tokens, types, scores=scores, unknown_token_id=unknown)


def metadata(model: str, tokens: list[str], types: Any, **others: Any) -> dict[str, Any]:
    """tokenizer.ggml.* by their keys; None leaves one out."""
    values = {
        "model": model,
        "tokens": tokens,
        "token_type": np.asarray(types, np.int32),
        **others,
    }
    return {PREFIX + key: value for key, value in values.items() if value is not None}


def _vocabulary(tokenizer_json: dict[str, Any]) -> tuple[list[str], np.ndarray]:
    ids = tokenizer_json["model"]["vocab"]
    added = tokenizer_json["added_tokens"]
    count = 1 + max(*ids.values(), *(token["id"] for token in added))
    tokens, types = [f"[PAD{number}]" for number in range(count)], np.full(count, UNUSED, np.int32)
    for token, token_id in ids.items():
        tokens[token_id], types[token_id] = token, NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    return tokens, types
