"""The token ids of one talk, from its first token on. The KV cache trails it, never leads it."""

from __future__ import annotations

import operator
from collections.abc import Sequence


class Timeline:
    """All token ids of a session, whether their KV is in the cache or not."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError unless every id is in the vocabulary."""
        for token_id in ids:
            operator.index(token_id)  # TypeError for what is no integer
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}"
                )

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids that were checked before."""
        self.ids.extend(int(token_id) for token_id in ids)

    def rewind(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` ids; ValueError when there are fewer."""
        if not 0 <= num_tokens <= len(self.ids):
            raise ValueError(
                f"cannot rewind to {num_tokens}: the timeline has {len(self.ids)} tokens"
            )
        del self.ids[num_tokens:]

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many leading ids are the same."""
        length = 0
        for own, other in zip(self.ids, ids):
            if own != other:
                break
            length += 1
        return length
