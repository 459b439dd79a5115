"""Thinking and answer told apart while tokens come, by the markers of each kind of model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from moechat.engine.text import TextModel
from moechat.text.answer_parts import Splitter
from moechat.text.reasoning import ReasoningFormat
from moechat.text.tokenizer import Tokenizer

IM_START, IM_END, OPEN, CLOSE = 151644, 151645, 151667, 151668


def split(splitter: Splitter, ids: Sequence[int]) -> tuple[str, str]:
    """Thinking and answer."""
    said = [*(splitter.push(token_id) for token_id in ids), splitter.flush()]
    return "".join(part.reasoning for part in said), "".join(part.answer for part in said)


def from_qwen3(qwen3: TextModel, text: str, prompt: str = "<|im_start|>assistant\n") -> object:
    ids = qwen3.tokenizer.encode_with_added_tokens(text)
    return split(qwen3.reasoning.splitter(qwen3.tokenizer.encode_with_added_tokens(prompt)), ids)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nhm 🙂\n</think>\n\nfine", "hm 🙂", "fine"),
        ("\n <think>\n\na\n\nb\n\n\n</think>\n\n\nx\n\ny\n\n", "a\n\nb", "x\n\ny\n\n"),
        ("<think>\n\n</think>\n\nfine", "", "fine"),
        ("<think></think>fine", "", "fine"),
        ("fine", "", "fine"),
        ("  \n fine\n", "", "  \n fine\n"),
        ("", "", ""),
        (" \n", "", " \n"),
        ("<think>\nnever done\n", "never done", ""),
        # Tags of the model at any other place divide nothing. They have no text of their own.
        ("<think>\na</think>\n\nb</think>c<think>d</think>e", "a", "bcde"),
        ("fine <think>too</think> late", "", "fine too late"),
        ("a</think>b", "", "ab"),
        ("<think>a<think>b</think>c", "ab", "c"),
    ],
)
def test_tags_that_are_tokens(qwen3: TextModel, text: str, reasoning: str, answer: str) -> None:
    assert from_qwen3(qwen3, text) == (reasoning, answer)
    ids = qwen3.tokenizer.encode_with_added_tokens(text)
    parts = qwen3.reasoning.parts([], ids)
    assert (parts is None) == (not text.lstrip().startswith("<think>"))
    if parts is not None and CLOSE in ids:
        assert list(parts.answer_ids) == ids[len(ids) - len(parts.answer_ids) :]
        assert qwen3.tokenizer.decode(list(parts.answer_ids)).startswith(answer[:1])


def test_ordinary_tokens_that_spell_a_tag_are_text(qwen3: TextModel) -> None:
    spelled = qwen3.tokenizer.encode("</think>")
    opening = qwen3.tokenizer.encode("<think>")
    assert {OPEN, CLOSE}.isdisjoint([*spelled, *opening])
    ids = [OPEN, *spelled, 64, CLOSE, *spelled, *opening]
    assert split(qwen3.reasoning.splitter([]), ids) == ("</think>a", "</think><think>")
    assert split(qwen3.reasoning.splitter([]), [*opening, 64, *spelled]) == (
        "",
        "<think>a</think>",
    )


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think>\nx<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_may_open_the_thinking(qwen3: TextModel, prompt: str, is_open: bool) -> None:
    expected = ("r", "a") if is_open else ("", "ra")
    assert from_qwen3(qwen3, "r</think>a", prompt) == expected


def test_characters_are_not_mixed_up_at_a_tag(qwen3: TextModel) -> None:
    half = [qwen3.tokenizer.token_id(byte) for byte in "ðŁ"]  # of an emoji
    ids = [OPEN, 64, *half, CLOSE, *half]
    assert split(qwen3.reasoning.splitter([]), ids) == ("a\ufffd", "\ufffd")


def test_what_is_shown_at_once(qwen3: TextModel) -> None:
    splitter = qwen3.reasoning.splitter([])
    ids = qwen3.tokenizer.encode_with_added_tokens("<think>\nhm\nso\n</think>\n\nfine.\n")
    said = [tuple(splitter.push(token_id)) for token_id in ids]
    assert said == [
        ("", ""),
        ("", ""),
        ("", "hm"),
        ("", ""),  # a newline that may be the last
        ("", "\nso"),
        ("", ""),
        ("", ""),
        ("", ""),
        ("fine", ""),
        (".", ""),
    ]
    assert splitter.flush() == ("\n", "")
    assert splitter.num_reasoning_tokens == 5


TAGGED = [
    (
        "<think>\nhm < and </thin\n</think>\n\nfine </think> <think>",
        "hm < and </thin",
        "fine </think> <think>",
    ),
    ("\n<think>a</think>b", "a", "b"),
    ("<thin>a</think>b", "", "<thin>a</think>b"),
    ("plain </think> text", "", "plain </think> text"),
    ("<think>never done </thi", "never done </thi", ""),
    ("<thi", "", "<thi"),
    (" ", "", " "),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), TAGGED)
def test_tags_of_ordinary_tokens(
    tokenizer: Tokenizer, text: str, reasoning: str, answer: str
) -> None:
    """DeepSeek-V3's vocabulary has no tags; the text is cut into tokens in every way there is."""
    draw = random.Random(5)
    form = ReasoningFormat(tokenizer, "{{ '</think>' in m }}")
    for _ in range(30):
        cuts = [0, *sorted(draw.sample(range(len(text) + 1), min(len(text), 9)))]
        spans = [text[at:end] for at, end in zip(cuts, [*cuts[1:], len(text)])]
        ids = [id_ for span in spans for id_ in tokenizer.encode(span)]
        said = split(form.splitter([]), ids)
        assert said == (reasoning, answer)
        parts = form.parts([], ids)
        assert (parts is None) == (not reasoning)
        if parts is not None:
            kept = parts.lead + tokenizer.decode(list(parts.answer_ids))
            assert kept.lstrip("\n") == answer
            assert parts.is_closed == ("</think>" in text)
    # Without a template that knows the tags they are nothing.
    plain = ReasoningFormat(tokenizer, "{{ m }}")
    assert split(plain.splitter([]), tokenizer.encode(text)) == ("", text)
    assert plain.parts([], tokenizer.encode(text)) is None


def test_a_prompt_that_opens_with_ordinary_tokens(tokenizer: Tokenizer) -> None:
    form = ReasoningFormat(tokenizer, "<think> {{ '</think>' in m }}")
    prompt = tokenizer.encode("hello<think>\n")
    assert split(form.splitter(prompt), tokenizer.encode("r</think>a")) == ("r", "a")
    prompt = tokenizer.encode("hello<think>\n</think>\n")
    assert split(form.splitter(prompt), tokenizer.encode("r</think>a")) == ("", "r</think>a")


HARMONY = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (
            "<|channel|>analysis<|message|>hm 🙂<|end|>"
            "<|start|>assistant<|channel|>final<|message|>ok\n\n<|return|>",
            "hm 🙂",
            "ok\n\n",
        ),
        ("<|channel|>final<|message|>ok", "", "ok"),
        ("<|message|>ok", "", "ok"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c<|end|>",
            "a\n\nb",
            "c",
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f json<|message|>{"x": 1}<|call|>',
            'a\n\n{"x": 1}',
            "",
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "{}", ""),
        # A message whose end is missing.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>analysis<|message|>cut", "cut", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", "a", ""),
        ("no format at all", "", "no format at all"),
        ("no format at all<|return|>", "", "no format at all"),
        # A header that was cut short is no answer.
        ("<|channel|>", "", ""),
        ("<|channel|>final", "", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final", "a", ""),
        # Text behind a message is answer, unless it turns out to be a header.
        ("<|channel|>analysis<|message|>a<|end|>So: b", "a", "So: b"),
        ("<|channel|>analysis<|message|>a<|end|>\n<|start|>assis", "a", ""),
        ("<|channel|>analysis<|message|>a<|end|>So<|start|>assistant<|message|>b", "a", "So\n\nb"),
        ("<|channel|>final<|message|>a<|end|>b<|end|>", "", "a\n\nb"),
        (
            "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b",
            "a",
            "b",
        ),
        ("<|end|>a", "", "a"),
        ("", "", ""),
    ],
)
def test_channels(gptoss: TextModel, text: str, reasoning: str, answer: str) -> None:
    encode = gptoss.tokenizer.encode_with_added_tokens
    assert split(gptoss.reasoning.splitter(encode(HARMONY)), encode(text)) == (reasoning, answer)


def test_channel_names_in_text_are_text(gptoss: TextModel) -> None:
    encode, plain = gptoss.tokenizer.encode_with_added_tokens, gptoss.tokenizer.encode
    spelled = "<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = [*encode("<|channel|>analysis<|message|>"), *plain(spelled), *encode("<|end|>")]
    assert split(gptoss.reasoning.splitter(encode(HARMONY)), ids) == (spelled, "")


def test_a_prompt_may_hold_the_header(gptoss: TextModel) -> None:
    encode = gptoss.tokenizer.encode_with_added_tokens
    final = HARMONY + "<|channel|>final<|message|>"
    assert split(gptoss.reasoning.splitter(encode(final)), encode("ok")) == ("", "ok")
    begun = HARMONY + "<|channel|>analysis<|message|>so far"
    ids = encode(" on<|end|><|start|>assistant<|channel|>final<|message|>ok")
    splitter = gptoss.reasoning.splitter(encode(begun))
    assert split(splitter, ids) == (" on", "ok")
    assert splitter.num_reasoning_tokens == 1
    assert split(gptoss.reasoning.splitter([]), encode("raw")) == ("", "raw")


def test_parts_of_channels(gptoss: TextModel) -> None:
    encode = gptoss.tokenizer.encode_with_added_tokens
    ids = encode(
        "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c d"
    )
    parts = gptoss.reasoning.parts(encode(HARMONY), ids)
    assert parts is not None
    assert parts.reasoning_ids == tuple(encode("a b")) and parts.answer_ids == tuple(encode("c d"))
    assert gptoss.reasoning.parts(encode(HARMONY), encode("none")) is None
    ids = encode("<|channel|>analysis<|message|>a<|end|>b c")
    parts = gptoss.reasoning.parts(encode(HARMONY), [*ids, *encode("<|end|>")])
    assert parts is not None and parts.answer_ids == tuple(encode("b c"))
    cut = gptoss.reasoning.parts(encode(HARMONY), encode("<|channel|>final"))
    assert cut is not None and (cut.reasoning_ids, cut.answer_ids) == ((), ())


def test_a_model_without_markers(mini_tokenizer: Tokenizer) -> None:
    form = ReasoningFormat(mini_tokenizer, "{{ messages }}")
    ids = mini_tokenizer.encode("<think>a</think>\nb")
    assert split(form.splitter([]), ids) == ("", "<think>a</think>\nb")
    assert form.parts([], ids) is None
