"""Perplexity of a model on a file, as it runs: weights and KV cache as they are used for answers.

A text is cut in windows of so many of its tokens, each read without what came before it, behind the
token that the model's talks begin with, if there is one. The token after each one that is read
counts: so many a window, and every token of the text but its very first once. A conversation is
rendered whole by the model's chat template and read alone; of it every token counts but the first:
user turns, replies and the template's own tokens alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moechat.engine.engine import Engine
from moechat.engine.session import Session
from moechat.errors import Usage
from moechat.eval.likelihood import Likelihood, likelihood
from moechat.eval.progress import Progress
from moechat.eval.texts import Source, encode_conversations, leading_ids, windows

# Of one extend, so that the logits of a large vocabulary stay small; a GPU, to which all weights
# cross each time, reads as many as their logits allow.
PIECE_TOKENS = 256
_GPU_LOGITS = 1 << 27
WINDOW_TOKENS = 2048  # of a window, where the context has room

Show = Callable[[str], None]


@dataclass(slots=True)
class Perplexity:
    """What is known so far: a likelihood for each window, and what was left out."""

    unit: str = "window"  # or "chat"
    num_windows: int = 0
    window_tokens: int | None = None  # of the text, that are read together; None: of chats
    too_long: int = 0  # conversations longer than the context
    windows: list[Likelihood] = field(default_factory=list)

    @property
    def total(self) -> Likelihood:
        """Of all windows."""
        return sum(self.windows, Likelihood())


def measure_perplexity(
    engine: Engine,
    source: Source,
    window_tokens: int | None,
    limit: int | None,
    found: Perplexity,
    show: Show,
) -> None:
    """Fill ``found``, window by window; ``limit`` of them.

    ``window_tokens`` None: WINDOW_TOKENS, or what the context has room for. Raises Usage for a text
    too short, and for windows that are longer than the context.
    """
    skipped = 0  # leading ids, which no text predicts
    if source.conversations:
        found.unit = "chat"
        pieces = list(encode_conversations(source, engine.text))[:limit]
        found.too_long = sum(len(ids) > engine.context_tokens for ids in pieces)
        pieces = [ids for ids in pieces if len(ids) <= engine.context_tokens]
    else:
        lead = leading_ids(engine.text)
        skipped = len(lead)
        found.window_tokens = length = _window_within(engine.context_tokens, skipped, window_tokens)
        ids = engine.text.tokenizer.encode(source.text)
        pieces = windows(ids, lead, skipped + length, full=False)[:limit]
    if not any(len(ids) > 1 + skipped for ids in pieces):
        raise Usage("there is nothing to measure", "a text of two tokens or more is needed")
    found.num_windows = len(pieces)
    progress = Progress(sum(map(len, pieces)))
    piece = PIECE_TOKENS
    if engine.prefill_choice.gpu is not None:
        piece = max(piece, _GPU_LOGITS // engine.spec.vocab_size)
    session = engine.session()
    try:
        for number, ids in enumerate(pieces, 1):
            show(f"{found.unit} {number} of {len(pieces)}{progress.left}")
            session.rewind(0)
            if skipped:
                session.extend(ids[:skipped], logits=None)
            found.windows.append(_of_window(session, ids[skipped:], piece))
            progress.add(len(ids))
    finally:
        session.close()


def _window_within(context_tokens: int, lead_tokens: int, window_tokens: int | None) -> int:
    room = context_tokens - lead_tokens
    if window_tokens is None:
        return min(WINDOW_TOKENS, room)
    if window_tokens > room:
        besides = f", {lead_tokens} of them for the token that talks begin with"
        raise Usage(
            f"--window cannot be {window_tokens:,}",
            f"the context has {context_tokens:,} tokens{besides if lead_tokens else ''}",
        )
    return window_tokens


def _of_window(session: Session, ids: list[int], piece_tokens: int) -> Likelihood:
    """Of all ids but the first."""
    total = Likelihood()
    for begin in range(0, len(ids) - 1, piece_tokens):
        piece = ids[begin : min(begin + piece_tokens, len(ids) - 1)]
        logits_TV = session.extend(piece)
        assert logits_TV is not None
        total += likelihood(logits_TV, ids[begin + 1 : begin + 1 + len(piece)])
    return total
