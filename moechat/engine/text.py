"""The text side of a model: tokenizer, chat template, and how it marks thinking and the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.errors import TextUnavailable
from moechat.text import harmony
from moechat.text.chat_template import ChatTemplate
from moechat.text.reasoning import ReasoningFormat
from moechat.text.template_source import (
    configured_template,
    named_tokens,
    read_config,
    read_template,
)
from moechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers


class TextModel:
    """Everything that stands between the text of a talk and the token ids of one model."""

    def __init__(
        self, tokenizer: Tokenizer, config: Mapping[str, Any], source: str, origin: str
    ) -> None:
        """``config``: tokenizer_config.json. ``source``: the template, found in ``origin``."""
        named = named_tokens(config)
        self.tokenizer = tokenizer
        self.template = ChatTemplate(source, origin, tokenizer, named)
        self.reasoning = ReasoningFormat(tokenizer, source, self.template.control_ids)
        self._eos = named.get("eos_token")

    @classmethod
    def open(cls, folder: Path) -> TextModel:
        """Read a folder. Raises TextUnavailable when it lacks something, CheckpointDamaged."""
        tokenizer = Tokenizer.open(folder)
        config = read_config(folder)
        return cls(tokenizer, config, *read_template(folder, config))

    @classmethod
    def from_parts(
        cls,
        tokenizer: tokenizers.Tokenizer,
        tokenizer_config: Mapping[str, Any],
        chat_template: str | None = None,
        *,
        origin: str,
    ) -> TextModel:
        """From what a file of another kind holds; ``origin`` names it in messages.

        ``tokenizer_config`` has the keys of tokenizer_config.json that matter: bos_token, eos_token
        and the like, and chat_template, unless that is given apart. Raises TextUnavailable when
        there is no template, CheckpointDamaged.
        """
        source = chat_template or configured_template(tokenizer_config, origin)
        if source is None:
            raise TextUnavailable(f"{origin} has no chat template", "it may be no chat model")
        return cls(Tokenizer(tokenizer), tokenizer_config, source, origin)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer as far as the text side knows, to be added to the config's.

        The tokenizer's eos token and what the template writes behind an answer: a folder whose
        config only knows the end of a document (Llama 3 has such) must stop there, too.
        """
        added = self.tokenizer.added_tokens
        if self.reasoning.is_harmony:  # what its template writes there ends any message
            ends = [added.get(content) for content in harmony.END_TOKENS]
        else:
            ends = [self.template.turn_end_id]
        if self._eos is not None:
            ends.append(self.tokenizer.token_id(self._eos))
        return tuple(dict.fromkeys(id_ for id_ in ends if id_ is not None))
