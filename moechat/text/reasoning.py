"""How a model marks its thinking, found out from its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from moechat.messages import Parts
from moechat.text import harmony
from moechat.text.answer_parts import Splitter
from moechat.text.detokenizer import Detokenizer
from moechat.text.harmony import Harmony
from moechat.text.think_tags import KNOWN_TAGS, Tags, TextTags, TokenTags
from moechat.text.tokenizer import Tokenizer

_TAIL_IDS = 24  # the end of a prompt in which an opening tag and blank text would be


class ReasoningFormat:
    """Makes a splitter for each answer. Markers that are tokens count by id, others as text.

    Tags of ordinary tokens are looked for only if the chat template knows them; without markers
    everything is answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_source: str, hidden: frozenset[int] = frozenset()
    ) -> None:
        """Ids in ``hidden`` have no text."""
        self._tokenizer, self._hidden = tokenizer, hidden
        added = tokenizer.added_tokens
        self.is_harmony = all(marker in added for marker in harmony.MARKERS)
        self._tags: Tags | None = None
        self._tag_ids: tuple[int, int] | None = None
        for tags in KNOWN_TAGS if not self.is_harmony else ():
            if tags.opening in added and tags.closing in added:
                self._tags = tags
                self._tag_ids = added[tags.opening], added[tags.closing]
                break
        else:
            known = (tags for tags in KNOWN_TAGS if tags.closing in template_source)
            self._tags = None if self.is_harmony else next(known, None)

    def splitter(self, prompt_ids: Sequence[int]) -> Splitter:
        """For the answer to a prompt, whose end may hold the opening marker."""
        detokenizer = Detokenizer(self._tokenizer, hidden=self._hidden)
        if self.is_harmony:
            added, markers = self._tokenizer.added_tokens, harmony.MARKERS + harmony.END_TOKENS
            ids = {marker: added[marker] for marker in markers if marker in added}
            return Harmony(detokenizer, ids, prompt_ids)
        if self._tags is None:
            return Splitter(detokenizer)
        is_open = self._is_open(list(prompt_ids[-_TAIL_IDS:]), self._tags)
        if self._tag_ids is not None:
            return TokenTags(detokenizer, self._tags, self._tag_ids, is_open)
        return TextTags(detokenizer, self._tags, is_open)

    def parts(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> Parts | None:
        """The ids of a whole answer by what they are."""
        splitter = self.splitter(prompt_ids)
        for token_id in ids:
            splitter.push(token_id)
        return splitter.parts()

    def _is_open(self, tail: list[int], tags: Tags) -> bool:
        """Whether a prompt with that end has opened the thinking: only blank text came since."""
        if self._tag_ids is not None:
            if self._tag_ids[0] not in tail:
                return False
            last = len(tail) - 1 - tail[::-1].index(self._tag_ids[0])
            text = self._tokenizer.decode(tail[last + 1 :], skip_special=False)
            return not text or text.isspace()
        text = self._tokenizer.decode(tail, skip_special=False)
        return text.rstrip().endswith(tags.opening)
