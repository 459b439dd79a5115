"""The merges of a SentencePiece vocabulary, which has only scores; derived once, then kept.

A token's score says how early two pieces are merged into it, so that every way to split it into
two tokens is a merge. For 260,000 tokens finding them takes a second, reading them back a tenth.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moechat.whole_file import whole_file

_LAYOUT = b"moechat merges 1"  # another layout or another order of merges: another name
_DIGEST_BYTES = 32
_LONGEST_TOKEN = 1024  # characters

Pairs = NDArray[np.int32]


def merges_by_score(
    tokens: Sequence[str], scores: NDArray[np.float32], cache_folder: Path | None
) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they are to be merged.

    ``tokens`` are all different. Results are kept in ``cache_folder``, named by the content that
    they follow from; a file there that is damaged is made again, and one that cannot be written is
    done without.
    """
    path = None
    if cache_folder is not None:
        path = cache_folder / f"merges-{_identity(tokens, scores)}.bin"
    pairs = _read(path, len(tokens)) if path else None
    if pairs is None:
        pairs = derive_merges(tokens, scores)
        if path:
            _write(path, pairs)
    left, right = (map(tokens.__getitem__, side.tolist()) for side in pairs.T)
    return list(zip(left, right))


def derive_merges(tokens: Sequence[str], scores: NDArray[np.float32]) -> Pairs:
    """[merges, 2] token ids. First the merges into tokens of the highest score.

    Of equal scores first those with longer parts, the left one before the right: so runs of spaces,
    which all have one score, become as long as they can.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found = array("i")
    for token_id, token in enumerate(tokens):
        # Of longer tokens, which no tokenizer has, a hostile file could have a very long one.
        for place in range(1, len(token) if len(token) <= _LONGEST_TOKEN else 0):
            left_id = ids.get(token[:place])
            if left_id is not None:
                right_id = ids.get(token[place:])
                if right_id is not None:
                    found.extend((left_id, right_id, token_id, place, len(token) - place))
    left, right, merged, left_length, right_length = np.array(found, np.int32).reshape(-1, 5).T
    order = np.lexsort((-right_length, -left_length, -scores[merged]))
    pairs: Pairs = np.stack([left, right], axis=1)[order]
    return pairs


def _identity(tokens: Sequence[str], scores: NDArray[np.float32]) -> str:
    digest = hashlib.blake2b(_LAYOUT, digest_size=_DIGEST_BYTES)
    digest.update("\0".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(np.ascontiguousarray(scores).tobytes())
    return digest.hexdigest()


def _read(path: Path, num_tokens: int) -> Pairs | None:
    """The pairs in a file: its digest, then int32 [merges, 2]. None when anything is wrong."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    stored, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if len(body) % 8 or hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != stored:
        return None
    pairs = np.frombuffer(body, "<i4").reshape(-1, 2)
    if len(pairs) and not 0 <= pairs.min() <= pairs.max() < num_tokens:
        return None
    return pairs


def _write(path: Path, pairs: Pairs) -> None:
    """Put the file there whole or not at all; another process may be doing the same."""
    body = pairs.astype("<i4").tobytes()
    content = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body
    # A full disk, a folder of somebody else: only time is lost.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(content)
