"""Earlier answers with thinking, as the templates of different vendors take them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moechat.engine.text import TextModel
from moechat.errors import BadParameter, Usage
from moechat.messages import Turn
from moechat.text.chat_template import ChatTemplate
from moechat.text.reasoning import ReasoningFormat
from moechat.text.thinking_switches import ThinkingSwitches
from moechat.text.tokenizer import Tokenizer

MakeTemplate = Callable[[str], ChatTemplate]


def talk(text: TextModel, written: str, prompt: str) -> list[Turn]:
    """Two turns and a question; the answer was generated as ``written`` after ``prompt``."""
    encode = text.tokenizer.encode_with_added_tokens
    ids = encode(written)
    parts = text.reasoning.parts(encode(prompt), ids)
    answer = Turn("assistant", "shown", tuple(ids), "thought", parts)
    return [Turn("user", "2+2?"), answer, Turn("user", "and 3+3?")]


def test_qwen3_drops_it_from_earlier_answers(qwen3: TextModel) -> None:
    turns = talk(qwen3, "<think>\nSimple sum.\n</think>\n\n4", "<|im_start|>assistant\n")
    ids = qwen3.template.encode(turns)
    assert qwen3.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nand 3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    last = qwen3.template.encode(turns[:2], add_generation_prompt=False)
    assert qwen3.tokenizer.decode(last, skip_special=False).endswith(
        "<|im_start|>assistant\n<think>\nSimple sum.\n</think>\n\n4<|im_end|>\n"
    )
    assert last[-len(turns[1].ids or ()) - 2 : -2] == list(turns[1].ids or ())


def test_the_answer_keeps_its_ids(qwen3: TextModel) -> None:
    odd = (19, 19, 16)  # "441" in tokens that no encoding gives
    ids = (151667, 198, 64, 198, 151668, 271, *odd)
    turns = [Turn("user", "a"), Turn("assistant", "441", ids), Turn("user", "b")]
    turns[1] = Turn("assistant", "441", ids, "a", qwen3.reasoning.parts([], ids))
    prompt = qwen3.template.encode(turns)
    at = prompt.index(19)
    assert tuple(prompt[at : at + 3]) == odd
    assert {151667, 151668}.isdisjoint(prompt)


def test_thinking_that_was_cut_leaves_an_empty_answer(qwen3: TextModel) -> None:
    turns = talk(qwen3, "<think>\nSimple", "<|im_start|>assistant\n")
    text = qwen3.tokenizer.decode(qwen3.template.encode(turns), skip_special=False)
    assert "<|im_start|>assistant\n<|im_end|>\n" in text


def test_an_answer_without_thinking_is_as_generated(qwen3: TextModel) -> None:
    turns = talk(qwen3, "4", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert turns[1].parts is None
    text = qwen3.tokenizer.decode(qwen3.template.encode(turns), skip_special=False)
    assert "<|im_start|>assistant\n4<|im_end|>\n" in text


def test_gptoss_drops_it_and_keeps_the_final_channel(gptoss: TextModel) -> None:
    written = (
        "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    turns = talk(gptoss, written, "<|start|>assistant")
    text = gptoss.tokenizer.decode(gptoss.template.encode(turns), skip_special=False)
    assert text.endswith(
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>and 3+3?<|end|><|start|>assistant"
    )
    last = gptoss.template.encode(turns[:2], add_generation_prompt=False)
    assert gptoss.tokenizer.decode(last, skip_special=False).endswith(
        "<|start|>assistant" + written + "<|return|>"
    )


def inline(
    make_template: MakeTemplate, tokenizer: Tokenizer, source: str, written: str, prompt: str = ""
) -> tuple[str, list[int], list[int]]:
    """What a template that knows no field for thinking makes of an answer with tags."""
    template = make_template(source)
    ids = tokenizer.encode(written)
    parts = ReasoningFormat(tokenizer, "</think>").parts(tokenizer.encode(prompt), ids)
    prompt_ids = template.encode([Turn("assistant", "", tuple(ids), "", parts)])
    return tokenizer.decode(prompt_ids, skip_special=False), prompt_ids, ids


def test_a_template_that_splits_at_the_tag(
    make_template: MakeTemplate, tokenizer: Tokenizer
) -> None:
    source = "{% set c = messages[0].content %}[{{ c.split('</think>')[-1] }}]"
    written = "<think>\nr\n</think>\n\na"
    assert inline(make_template, tokenizer, source, written)[0] == "[\n\na]"
    stripping = source.replace("[-1]", "[-1].lstrip('\\n')")
    assert inline(make_template, tokenizer, stripping, written)[0] == "[a]"
    assert inline(make_template, tokenizer, stripping, "r</think>\n\na", "<think>")[0] == "[a]"
    # Thinking that never ended is still known as thinking.
    assert inline(make_template, tokenizer, stripping, "<think>\nr")[0] == "[]"


def test_a_template_that_keeps_answers_whole_gets_the_generated_ids(
    make_template: MakeTemplate, tokenizer: Tokenizer
) -> None:
    written = "<think>\nr.\n</think>\n\na"
    for source in "{{ messages[0].content }}", "{{ messages[0]['content']|trim }}":
        text, prompt_ids, ids = inline(make_template, tokenizer, source, written)
        assert (text, prompt_ids) == (written, ids)
    # But thinking that never ended gets an end, for the answer that follows must not be thinking.
    cut = inline(make_template, tokenizer, "{{ messages[0].content }}", "<think>r")[0]
    assert cut == "<think>r</think>"
    split = [id_ for character in written for id_ in tokenizer.encode(character)]
    parts = ReasoningFormat(tokenizer, "</think>").parts([], split)
    turn = Turn("assistant", "", tuple(split), "", parts)
    assert make_template("{{ messages[0].content }}").encode([turn]) == split


@pytest.mark.parametrize("source", ["m['reasoning_content']", "m.get('thinking')", "m.reasoning"])
def test_fields_for_thinking_are_found(
    make_template: MakeTemplate, tokenizer: Tokenizer, source: str
) -> None:
    template = make_template(f"{{% set m = messages[0] %}}{{{{ {source} }}}}|{{{{ m.content }}}}")
    ids = tokenizer.encode("<think>r</think>a")
    parts = ReasoningFormat(tokenizer, "</think>").parts([], ids)
    prompt = template.encode([Turn("assistant", "", tuple(ids), "", parts)])
    assert tokenizer.decode(prompt) == "r|a"


def test_a_value_of_that_name_is_no_field(
    make_template: MakeTemplate, tokenizer: Tokenizer
) -> None:
    template = make_template(
        "{% if thinking is defined %}T{% endif %}{% set m = messages[0] %}"
        "{% if m.content == 'thinking' %}{% endif %}{{ m.content.split('</think>')[1] }}"
    )
    ids = tokenizer.encode("<think>r</think>a")
    parts = ReasoningFormat(tokenizer, "</think>").parts([], ids)
    prompt = template.encode([Turn("assistant", "", tuple(ids), "", parts)])
    assert tokenizer.decode(prompt) == "a"
    assert "thinking" in template.variables


def test_switches_of_real_templates(qwen3: TextModel, gptoss: TextModel) -> None:
    question = [Turn("user", "2+2?")]

    def end(text: TextModel, name: str, value: str | None) -> str:
        switches = ThinkingSwitches(text.template.variables)
        switches.set(name, value)
        ids = text.template.encode(question, variables=switches.variables)
        return text.tokenizer.decode(ids, skip_special=False)

    assert end(qwen3, "think", "off").endswith("assistant\n<think>\n\n</think>\n\n")
    assert end(qwen3, "think", "on").endswith("assistant\n")
    assert "Reasoning: high" in end(gptoss, "reasoning_effort", "high")
    assert "Reasoning: medium" in end(gptoss, "reasoning_effort", None)
    with pytest.raises(Usage, match=r"told to think or not.*--reasoning-effort"):
        end(gptoss, "think", "off")
    with pytest.raises(Usage, match=r"no reasoning effort.*--no-think"):
        end(qwen3, "reasoning_effort", "low")
    with pytest.raises(BadParameter, match="low, medium, high"):
        end(gptoss, "reasoning_effort", "extreme")


def test_switches_of_other_variables() -> None:
    switches = ThinkingSwitches(frozenset({"thinking", "messages"}))
    assert switches.describe() == [("think", None)]
    switches.set("think", "on")
    assert switches.variables == {"thinking": True}
    assert switches.describe() == [("think", "on")]
    with pytest.raises(BadParameter):
        switches.set("think", "yes")
    switches.set("think", None)
    assert switches.variables == {}
    none = ThinkingSwitches(frozenset({"messages"}))
    assert none.describe() == []
    for name in "think", "reasoning_effort":
        with pytest.raises(Usage, match="reads no such variable"):
            none.set(name, None)
