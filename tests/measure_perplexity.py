"""Perplexity of a model on conversations: ``python tests/measure_perplexity.py MODEL FILE``.

FILE is JSON, or JSON in xz: a list of conversations, each a list of [user, reply]. A conversation
is rendered whole by the model's chat template. Every token is counted but the first, which nothing
precedes: user turns, replies, and the template's own tokens alike, as mini's README counts them.
Conversations longer than the context are left out, and counted as such.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np

from moechat import Engine
from moechat.engine.session import Session
from moechat.messages import Turn

PIECE_TOKENS = 256  # so that the logits of a large vocabulary stay small


def read_conversations(path: Path) -> list[list[list[str]]]:
    content = path.read_bytes()
    conversations: list[list[list[str]]] = json.loads(
        lzma.decompress(content) if path.suffix == ".xz" else content
    )
    return conversations


def negative_log_likelihood(session: Session, ids: list[int]) -> float:
    """Of all ids but the first, in nats; float64 sums over float32 logits."""
    total = 0.0
    for begin in range(0, len(ids) - 1, PIECE_TOKENS):
        piece = ids[begin : min(begin + PIECE_TOKENS, len(ids) - 1)]
        logits = session.extend(piece)
        assert logits is not None
        logits = logits.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        following = ids[begin + 1 : begin + 1 + len(piece)]
        chosen = logits[np.arange(len(piece)), following]
        total += float(np.sum(np.log(np.exp(logits).sum(axis=1)) - chosen))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a registry name or a folder")
    parser.add_argument("file", type=Path, help="conversations, .json or .json.xz")
    parser.add_argument("--limit", type=int, default=None, help="only the first N conversations")
    parser.add_argument("--compute", default="bf16", choices=("bf16", "exact"))
    arguments = parser.parse_args()
    conversations = read_conversations(arguments.file)[: arguments.limit]
    began = time.monotonic()
    total, tokens, too_long = 0.0, 0, 0
    with Engine.open(arguments.model, compute=arguments.compute) as engine:
        session = engine.session()
        for conversation in conversations:
            turns = [
                Turn(role, text)
                for pair in conversation
                for role, text in zip(("user", "assistant"), pair)
            ]
            ids = engine.text.template.encode(turns, add_generation_prompt=False)
            if len(ids) > engine.context_tokens:
                too_long += 1
                continue
            session.rewind(0)
            total += negative_log_likelihood(session, ids)
            tokens += len(ids) - 1
    seconds = time.monotonic() - began
    print(
        f"perplexity {math.exp(total / max(tokens, 1)):.4f}  tokens {tokens}  "
        f"conversations {len(conversations) - too_long}  too long {too_long}  "
        f"seconds {seconds:.1f}"
    )


if __name__ == "__main__":
    main()
