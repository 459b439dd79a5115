"""How each splitting cuts; whole tokenizers are compared in test_gguf_tokenizer.py."""

import pytest

from moechat.text.gguf_pre_tokenizers import SPLITTINGS

TEXT = "I'll DON'T x1234 fooBAR\r\n\n  é中文 ok!!\n"
GPT_2 = "I 'll ␣DON ' T ␣x 1234 ␣fooBAR ␍␊␊␣ ␣é中文 ␣ok !! ␊"


def pieces(name, text=TEXT):
    """Pieces with blanks and ends of lines made visible."""
    pre_tokenizer = SPLITTINGS[name].pre_tokenizer()
    visible = str.maketrans({" ": "␣", "\r": "␍", "\n": "␊"})
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    return " ".join(text[begin:end].translate(visible) for begin, end in spans)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", GPT_2),
        ("olmo", GPT_2),
        ("smollm", GPT_2.replace("1234", "1 2 3 4")),
        ("default", GPT_2.replace("'ll", "' ll").replace("1234", "123 4")),
        ("llama-bpe", "I 'll ␣DON 'T ␣x 123 4 ␣fooBAR ␍␊␊ ␣ ␣é中文 ␣ok !!␊"),
        ("glm4", "I 'll ␣DON 'T ␣x 123 4 ␣fooBAR ␍␊␊ ␣ ␣é中文 ␣ok !!␊"),
        ("qwen2", "I 'll ␣DON 'T ␣x 1 2 3 4 ␣fooBAR ␍␊␊ ␣ ␣é中文 ␣ok !!␊"),
        ("gpt-4o", "I'll ␣DON'T ␣x 123 4 ␣foo BAR ␍␊␊ ␣ ␣é中文 ␣ok !!␊"),
        ("tekken", "I 'll ␣DON 'T ␣x 1 2 3 4 ␣foo BAR ␍␊␊ ␣ ␣é中文 ␣ok !!␊"),
        ("kimi-k2", "I'll ␣DON'T ␣x 123 4 ␣foo BAR ␍␊␊ ␣ ␣é 中文 ␣ok !!␊"),
        ("deepseek-v3", "I 'll ␣DON 'T ␣x 123 4 ␣fooBAR ␍␊␊ ␣ ␣é 中文 ␣ok !!␊"),
        ("deepseek-llm", "I ' ll ␣DON ' T ␣x 1 2 3 4 ␣fooBAR ␍ ␊ ␊ ␣ ␣é 中文 ␣ok !! ␊"),
        ("deepseek-coder", "I ' ll ␣DON ' T ␣x 1 2 3 4 ␣fooBAR ␍ ␊ ␊ ␣ ␣é 中文 ␣ok !! ␊"),
    ],
)
def test_how_text_is_cut(name, expected):
    assert pieces(name) == expected


@pytest.mark.parametrize("name", SPLITTINGS)
def test_no_splitting_loses_text(name):
    text = TEXT + "\t\x00 ١٢ ⅳ😀 \u3000Ա՞ა\u0301 " * 3
    spans = [span for _, span in SPLITTINGS[name].pre_tokenizer().pre_tokenize_str(text)]
    assert "".join(text[begin:end] for begin, end in spans) == text


def test_deepseeks_letters_leave_armenian_small_letters_out():
    assert pieces("deepseek-llm", "ԱԲ ж") == "ԱԲ ␣ж"
    assert pieces("deepseek-llm", "Աբ") == "Ա բ"


def test_qwen_composes_characters_first():
    assert SPLITTINGS["qwen2"].normalizer().normalize_str("e\u0301") == "é"
    assert SPLITTINGS["llama-bpe"].normalizer() is None
