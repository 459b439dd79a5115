"""The text side of a model folder: tokenizer and chat template, opened together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moechat.text.chat_template import ChatTemplate
from moechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """Tokenizer and chat template of one folder."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def open(cls, folder: Path) -> TextModel:
        """Read both. Raises TextUnavailable when the folder has none, CheckpointDamaged."""
        tokenizer = Tokenizer.open(folder)
        return cls(tokenizer, ChatTemplate.open(folder, tokenizer))
