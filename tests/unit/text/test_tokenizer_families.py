"""The prompts, ids and streams of many families' own tokenizers and templates.

Tokenizers that are not in the tree are looked for in the folder that MOECHAT_TEST_TOKENIZERS names;
fixtures/chat/README.md tells how to get them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from text_fixtures import CHAT, recorded, unpack

from moechat.engine.text import TextModel
from moechat.errors import TextUnavailable, Usage
from moechat.messages import Turn
from moechat.text.chat_template import ChatTemplate
from moechat.text.detokenizer import Detokenizer
from moechat.text.tokenizer import Tokenizer

IN_TREE = ("qwen3", "mistral_v3")
FOLDERS = os.environ.get("MOECHAT_TEST_TOKENIZERS")
END_TOKENS = {
    "qwen3": ["<|im_end|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "gemma3": ["<end_of_turn>"],
    # Its tokenizer_config.json, too, only knows the end of a text.
    "llama3": ["<|eot_id|>", "<|end_of_text|>"],
    "llama3_1": ["<|eot_id|>"],
}


@pytest.fixture(scope="module", params=[*IN_TREE, "gptoss", "gemma3", "llama3", "llama3_1"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name, recorded cases, folder and tokenizer of one family."""
    name = request.param
    if name in IN_TREE:
        folder = unpack(name, tmp_path_factory.mktemp(name))
        return name, recorded(name), folder, Tokenizer.open(folder)
    folder = Path(FOLDERS or "") / name
    if not FOLDERS or not (folder / "tokenizer.json").is_file():
        pytest.skip(f"MOECHAT_TEST_TOKENIZERS holds no {name}, and the tree carries none")
    return name, recorded(name), folder, Tokenizer.open(folder)


def test_prompts(family: Any, recorded_clock: None) -> None:
    _, cases, folder, tokenizer = family
    if not cases["chat"]:
        with pytest.raises(TextUnavailable, match="has no chat template"):
            ChatTemplate.open(folder, tokenizer)
        return
    template = ChatTemplate.open(folder, tokenizer)
    for case in cases["chat"]:

        def encode(case: dict[str, Any] = case) -> list[int]:
            return template.encode_messages(case["messages"], tools=case["tools"], **case["kwargs"])

        if "error" in case:
            with pytest.raises(Usage, match=re.escape(case["error"].split(": ", 1)[1][:60])):
                encode()
        else:
            assert encode() == case.get("ids_sanitized", case["ids"]), case["name"]
    assert len(cases["chat"]) >= 15


def test_encodings(family: Any) -> None:
    _, cases, _, tokenizer = family
    added = set(tokenizer.added_tokens.values())
    for case in cases["encode"]:
        assert tokenizer.encode_with_added_tokens(case["text"]) == case["ids"], case["name"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"], case["name"]
        plain = tokenizer.encode(case["text"])
        assert tokenizer.special_ids.isdisjoint(plain), case["name"]
        # Recorded with added tokens that are not special still taken for tokens.
        as_text = case.get("ids_special_tokens_as_text", case["ids"])
        if added.isdisjoint(as_text):
            assert plain == as_text, case["name"]


def test_streams(family: Any) -> None:
    _, cases, _, tokenizer = family
    for case in cases["stream"]:
        detokenizer = Detokenizer(tokenizer, skip_special=case["skip_special_tokens"])
        increments = [detokenizer.push(token_id) for token_id in case["ids"]]
        tail = detokenizer.flush()
        # A note: the library makes a U+FFFD of every stray byte, not of every cut character.
        expected = case["text"] if "note" not in case else "".join(case["increments"])
        assert "".join(increments) + tail == expected + ("note" in case) * case["flush"]
        if not case["name"].endswith("/not-utf8"):
            assert (increments, tail) == (case["increments"], case["flush"]), case["name"]


def test_end_tokens(family: Any) -> None:
    name, _, folder, _ = family
    if name == "mistral_v3":
        return
    text = TextModel.open(folder)
    assert [text.tokenizer.token(id_) for id_ in text.end_ids] == END_TOKENS[name]


def test_gptoss_prompts_in_another_vocabulary(gptoss: TextModel, recorded_clock: None) -> None:
    num_refused = 0
    for case in recorded("gptoss")["chat"]:
        if "error" in case:
            num_refused += 1
            with pytest.raises(Usage, match="channel"):
                gptoss.template.encode_messages(case["messages"], **case["kwargs"])
            continue
        ids = gptoss.template.encode_messages(
            case["messages"], tools=case["tools"], **case["kwargs"]
        )
        assert gptoss.tokenizer.decode(ids, skip_special=False) == case["prompt"], case["name"]
        num_control = sum(id_ in gptoss.template.control_ids for id_ in ids)
        assert num_control == sum(
            id_ > 200_000 for id_ in case.get("ids_sanitized", case["ids"])
        ), case["name"]
    assert num_refused == 1
    assert [gptoss.tokenizer.token(id_) for id_ in gptoss.end_ids] == END_TOKENS["gptoss"]


MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if (loop.index0 % 2) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[INST]{% if loop.last and system %}{{ system + '\\n\\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_mistral_prompts_with_a_template(mistral_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Such as older Mistral folders have in tokenizer_config.json gives mistral-common's ids."""
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": MISTRAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = ChatTemplate.open(tmp_path, mistral_tokenizer)
    cases = json.loads((CHAT / "mistral_v3" / "mistral_common.json").read_text(encoding="utf-8"))
    other = []
    for case in cases["chat"]:
        if "error" in case or case["name"] == "two_user_turns_in_a_row":
            continue
        ids = template.encode_messages(case["messages"])
        controls = [id_ for id_ in ids if id_ in template.control_ids]
        assert controls == [id_ for id_ in case["ids"] if id_ in template.control_ids]
        if ids != case["ids"]:
            other.append(case["name"])
    # Text that spells control tokens is encoded in pieces there: other merges, the same text.
    assert other == ["own_special_strings_in_user_text"]
    assert template.turn_end_id == 2
    generated = [Turn("user", "Hi"), Turn("assistant", "", (7, 8)), Turn("user", "Again")]
    spelled = [mistral_tokenizer.token(id_) for id_ in template.encode(generated)]
    assert spelled[:3] == ["<s>", "[INST]", "▁Hi"] and spelled[-3:] == [
        "[INST]",
        "▁Again",
        "[/INST]",
    ]
    assert template.encode(generated)[4:7] == [7, 8, 2]
