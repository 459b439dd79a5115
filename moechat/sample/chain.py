"""The sampling chain, which runs in C++ (cpp/sample/sampler.h): order, and reasons for it.

1. repetition penalty: on raw logits, as its paper defines it (CTRL: positive logits divided,
   negative multiplied), once for every id of prompt or answer
2. presence penalty: an offset in logits, subtracted once for every id of the answer, so before
   temperature scales them
3. temperature: before the cuts, so that they see the probabilities that are drawn from; 0 takes the
   best token, the lowest id among equals
4. top-k: a count, so the order does not matter to it; first, because it makes the rest cheap
5. top-p: the fewest most probable tokens with at least this share of what top-k left
6. min-p: relative to the best token, which every cut keeps, so last or first alike
7. the draw: inverse CDF over the kept tokens, probability falling, id rising, by a number that
   depends on seed and position alone: the same in any batch, after any rewind
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moechat import _native
from moechat.sample.params import SamplingParams


def make_sampler(
    params: SamplingParams, seed: int, vocab: int, context_ids: Sequence[int]
) -> _native.Sampler:
    """The native sampler of one answer; ``seed`` stands in for ``params.seed``.

    ``context_ids`` are the ids before the answer: they count for the repetition penalty.
    """
    sampler = _native.Sampler(
        vocab=vocab,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        seed=seed,
    )
    sampler.add_context(np.asarray(context_ids, dtype=np.int32))
    return sampler
