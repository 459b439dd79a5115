"""Perplexity of a model on a file, as it runs: weights and KV cache as they are used for answers.

A text is cut in windows, each read without what came before it; a conversation is a window of its
own, rendered whole by the model's chat template. Every token counts but a window's first, which
nothing precedes: of conversations user turns, replies and the template's own tokens alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moechat.engine.engine import Engine
from moechat.engine.session import Session
from moechat.errors import Usage
from moechat.eval.likelihood import Likelihood, likelihood
from moechat.eval.texts import Source, encode_conversations, leading_ids, windows

PIECE_TOKENS = 256  # of one extend, so that the logits of a large vocabulary stay small
MIN_WINDOW_TOKENS = 16

Show = Callable[[str], None]


@dataclass(slots=True)
class Perplexity:
    """What is known so far: a likelihood for each window, and what was left out."""

    unit: str = "window"  # or "chat"
    num_windows: int = 0
    too_long: int = 0  # conversations longer than the context
    windows: list[Likelihood] = field(default_factory=list)

    @property
    def total(self) -> Likelihood:
        """Of all windows."""
        return sum(self.windows, Likelihood())


def measure_perplexity(
    engine: Engine,
    source: Source,
    window_tokens: int,
    limit: int | None,
    found: Perplexity,
    show: Show,
) -> None:
    """Fill ``found``, window by window; ``limit`` of them. Raises Usage for a text too short."""
    length = min(window_tokens, engine.context_tokens)
    skipped = 0  # leading ids, which no text predicts
    if source.conversations:
        found.unit = "chat"
        pieces = list(encode_conversations(source, engine.text))[:limit]
        found.too_long = sum(len(ids) > engine.context_tokens for ids in pieces)
        pieces = [ids for ids in pieces if len(ids) <= engine.context_tokens]
    else:
        lead = leading_ids(engine.text)
        if length < MIN_WINDOW_TOKENS:
            raise Usage(f"a window has {MIN_WINDOW_TOKENS} tokens or more")
        ids = engine.text.tokenizer.encode(source.text)
        pieces = windows(ids, lead, length, full=False)[:limit]
        skipped = len(lead)
    if not any(len(ids) > 1 + skipped for ids in pieces):
        raise Usage("there is nothing to measure", "a text of two tokens or more is needed")
    found.num_windows = len(pieces)
    session = engine.session()
    try:
        for number, ids in enumerate(pieces, 1):
            show(f"{found.unit} {number} of {len(pieces)}")
            session.rewind(0)
            if skipped:
                session.extend(ids[:skipped], logits=None)
            found.windows.append(_of_window(session, ids[skipped:]))
    finally:
        session.close()


def _of_window(session: Session, ids: list[int]) -> Likelihood:
    """Of all ids but the first."""
    total = Likelihood()
    for begin in range(0, len(ids) - 1, PIECE_TOKENS):
        piece = ids[begin : min(begin + PIECE_TOKENS, len(ids) - 1)]
        logits_TV = session.extend(piece)
        assert logits_TV is not None
        total += likelihood(logits_TV, ids[begin + 1 : begin + 1 + len(piece)])
    return total
