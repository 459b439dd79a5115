"""How text is split before byte-level BPE, by the name that GGUF files have for it.

The patterns are those of the tokenizers that the names stand for, as their public tokenizer.json
files (or tiktoken sources) have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _like_gpt_4(digits: str) -> str:
    """cl100k's pattern with so many digits in a piece."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _by_case(digits: str, tail: str, symbols_end: str, other: str = "") -> str:
    """o200k's pattern: words end where small letters turn into capitals.

    ``tail`` may follow a word; ``other`` is left out of words (kimi-k2: Chinese).
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{tail}|{before}{upper}+{lower}*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{symbols_end}|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class Splitting:
    """Patterns applied one after the other to what the ones before left whole.

    ``whole_words``: a piece that is a token is that token, whatever the merges say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The splitting and the byte alphabet, by the `tokenizers` library."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Normalizer | None:
        """What is done to the text before."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None


_LLAMA_3 = Splitting((_like_gpt_4(r"\p{N}{1,3}"),), whole_words=True)
_QWEN_2 = Splitting((_like_gpt_4(r"\p{N}"),), nfc=True)
_SINGLE_DIGITS = Splitting((r"\p{N}", _GPT_2))
_O200K = Splitting((_by_case(r"\p{N}{1,3}", rf"{_CONTRACTION}?", r"[\r\n/]*"),), whole_words=True)
# Letters with case, but those of some scripts and of newer versions of Unicode.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]"
)
_CJK_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

SPLITTINGS = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "glm4": _LLAMA_3,
    "dbrx": Splitting((_like_gpt_4(r"\p{N}{1,3}"),)),
    "smaug-bpe": Splitting((_like_gpt_4(r"\p{N}{1,3}"),)),
    "chatglm-bpe": Splitting((_like_gpt_4(r"\p{N}{1,3}"),)),
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "megrez": _QWEN_2,
    "stablelm2": Splitting((_like_gpt_4(r"\p{N}"),)),
    "solar-open": Splitting((_like_gpt_4(r"\p{N}"),)),
    "deepseek-llm": Splitting(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK_OR_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OR_HANGUL, r"\p{N}")),
    "deepseek-v3": Splitting(
        (
            r"\p{N}{1,3}",
            _CJK_OR_KANA,
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        )
    ),
    "kimi-k2": Splitting(
        (
            r"\p{Han}+|"
            + _by_case(r"\p{N}{1,3}", rf"{_CONTRACTION}?", r"[\r\n]*", other=r"&&[^\p{Han}]"),
        ),
        whole_words=True,
    ),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": Splitting((_by_case(r"\p{N}", "", r"[\r\n/]*"),), whole_words=True),
    "gpt-2": Splitting((_GPT_2,)),
    "gigachat": Splitting((_GPT_2,)),
    "mpt": Splitting((_GPT_2,)),
    "mellum": Splitting((_GPT_2,)),
    "trillion": Splitting((_GPT_2,)),
    "olmo": Splitting((_GPT_2,), nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
}
