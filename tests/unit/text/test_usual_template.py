"""Templates for GGUF files that come without one, against fixtures of the real ones."""

from __future__ import annotations

import jinja2
import pytest

from moechat.text.usual_template import usual_template

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
WANTED = {
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
    "<start_of_turn>model\nHi.<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n"
    "<start_of_turn>model\n",
    "qwen2": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n"
    "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama": "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("architecture", sorted(WANTED))
def test_a_talk(architecture):
    metadata = {"general.architecture": architecture, "tokenizer.ggml.pre": "llama-bpe"}
    family = usual_template(metadata)
    assert family is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(family[1])
    shown = template.render(messages=TALK, bos_token="<bos>", add_generation_prompt=True)
    assert shown == WANTED[architecture]
    without = template.render(messages=TALK[:2], bos_token="<bos>", add_generation_prompt=False)
    assert without.endswith(("<end_of_turn>\n", "<|im_end|>\n", "<|eot_id|>"))


def test_no_template_is_made_up_for_others():
    for metadata in ({}, {"general.architecture": "llama"}, {"general.architecture": "deepseek2"}):
        assert usual_template(metadata) is None
