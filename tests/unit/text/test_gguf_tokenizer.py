"""Tokenizers of GGUF files against the same ones in tokenizer.json, and what may be wrong."""

import json
import random
from pathlib import Path

import gguf_vocabulary as v
import numpy as np
import pytest
import tokenizers
from text_fixtures import recorded, unpack

from moechat.errors import CheckpointDamaged, TextUnavailable
from moechat.text.gguf_pre_tokenizers import SPLITTINGS
from moechat.text.gguf_tokenizer import build_tokenizer, tokenizer_config
from moechat.text.tokenizer import Tokenizer

PATH = Path("/models/m.gguf")
AWKWARD = [
    "don't", "I'LL", "camelCase", "HTTPServer", "   ", "\n\n", "\r\n \n", "\t\t", "1234567", "３４",
    "x²", "…", "中文字符", "日本語テスト", "한국어", "Привет", "שלום", "हिन्दी", "é", "e\u0301",
    "😀", "👨‍👩‍👧", "🇳🇴", "\u200b", "\u00a0", "\u3000", "ſ", "<|im_start|>", "[INST]", "</s>", "\0",
]  # fmt: skip


def awkward_texts(count):
    pick = random.Random(3)
    letters = "aB zZ.,!?-_/(){}<>|'0189"
    for _ in range(count):
        yield "".join(
            pick.choice(AWKWARD) if pick.random() < 0.4 else pick.choice(letters)
            for _ in range(pick.randint(1, 50))
        )


def assert_equal(library, other, cases):
    """Same ids and texts, of recorded cases and of random ones, with and without added tokens."""
    for case in cases["encode"]:
        ids = library.encode(case["text"], add_special_tokens=False).ids
        assert ids == case["ids"], case["name"]
        assert library.decode(ids, skip_special_tokens=False) == case["decoded"]
    plain, other_plain = Tokenizer(library), Tokenizer(other)
    for text in awkward_texts(500):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == other.encode(text, add_special_tokens=False).ids, text
        assert library.decode(ids) == other.decode(ids), text
        assert plain.encode(text) == other_plain.encode(text), text
    assert plain.added_tokens == other_plain.added_tokens
    assert plain.special_ids == other_plain.special_ids
    assert plain.vocab_size == other_plain.vocab_size


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("deepseek_v3", "deepseek-v3")])
def test_byte_level_vocabularies(name, pre, request, tmp_path):
    if name == "qwen3":
        path, cases = unpack(name, tmp_path) / "tokenizer.json", recorded(name)
    else:
        path = request.getfixturevalue("folder") / "tokenizer.json"
        cases = request.getfixturevalue("cases")
    library = build_tokenizer(v.byte_level_metadata(json.loads(path.read_bytes()), pre), PATH)
    assert_equal(library, tokenizers.Tokenizer.from_file(str(path)), cases)


def test_sentence_piece_vocabularies(tmp_path):
    path = unpack("mistral_v3", tmp_path) / "tokenizer.json"
    metadata = v.sentence_piece_metadata(json.loads(path.read_bytes()))
    library = build_tokenizer(metadata, PATH, tmp_path / "cache")
    assert_equal(library, tokenizers.Tokenizer.from_file(str(path)), recorded("mistral_v3"))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    again = build_tokenizer(metadata, PATH, tmp_path / "cache")
    assert again.to_str() == library.to_str()


BYTES = [f"<0x{value:02X}>" for value in range(256)]


def small_sentence_piece(**others):
    """A vocabulary as Gemma's: runs of blanks are given, scored below all others."""
    tokens = ["<unk>", "<end>", "  ", "   ", "<h1>", *BYTES, "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    types = [v.CONTROL, v.CONTROL] + [v.USER_DEFINED] * 3 + [v.BYTE] * 256 + [v.NORMAL] * 7
    scores = np.array([-1000.0] * 5 + [0.0] * 256 + [-3, -1, -2, -10, -11, -12, -13], np.float32)
    settings = {"scores": scores, "unknown_token_id": 0, "add_space_prefix": False, **others}
    return build_tokenizer(v.metadata("llama", tokens, types, **settings), PATH)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["ab"]),
        (" ab", ["▁ab"]),
        (" aab", ["▁a", "ab"]),
        ("a  b", ["a", "▁▁", "b"]),
        ("a   b", ["a", "▁▁▁", "b"]),
        ("a    b", ["a", "▁▁▁", "▁b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<end>a<h1>", ["<end>", "a", "<h1>"]),
        ("<unk>", ["<unk>"]),
    ],
)  # fmt: skip
def test_pieces_merge_by_score(text, expected):
    library = small_sentence_piece()
    encoding = library.encode(text, add_special_tokens=False)
    assert encoding.tokens == expected
    assert library.decode(encoding.ids, skip_special_tokens=False) == text


def test_a_first_space_is_added_and_taken_away_again():
    library = small_sentence_piece(add_space_prefix=None)
    encoding = library.encode("b", add_special_tokens=False)
    assert encoding.tokens == ["▁b"] and library.decode(encoding.ids) == "b"
    assert small_sentence_piece().encode("b", add_special_tokens=False).tokens == ["b"]


def small_byte_level(**others):
    settings = {
        "tokens": ["a", "b", "Ġ", "1", "ab", "Ġa", "<|end|>", "<tool>", "[PAD8]"],
        "types": [v.NORMAL] * 6 + [v.CONTROL, v.USER_DEFINED, v.UNUSED],
        "pre": "qwen2",
        "merges": ["a b", "Ġ a"],
        **others,
    }
    return v.metadata("gpt2", **settings)


def test_types_say_which_tokens_are_added_and_which_do_not_exist():
    tokenizer = Tokenizer(build_tokenizer(small_byte_level(), PATH))
    assert tokenizer.added_tokens == {"<|end|>": 6, "<tool>": 7}
    assert tokenizer.special_ids == {6}
    assert tokenizer.token(8) is None and tokenizer.token_id("[PAD8]") is None
    assert tokenizer.encode_with_added_tokens("ab<|end|> a<tool>") == [4, 6, 5, 7]
    assert tokenizer.decode([4, 6, 5, 7, 8]) == "ab a<tool>"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": ["a", "a"], "types": [1, 1], "merges": []}, "spelled alike"),
        ({"types": [1, 1]}, "token_type is no array of 9 integers"),
        ({"token_type": [1] * 9}, "token_type is no array"),
        ({"token_type": None}, "token_type is no array"),
        ({"token_type": np.full(9, 1, np.float32)}, "token_type is no array"),
        ({"types": [1] * 8 + [0]}, "token_type has codes that are none of 1 to 6"),
        ({"types": [1] * 8 + [7]}, "token_type has codes that are none of 1 to 6"),
        ({"scores": np.full(9, np.nan, np.float32)}, "scores has values that are no finite"),
        ({"scores": np.full(9, 1, np.int32)}, "scores is no array of 9 numbers"),
        ({"scores": np.zeros(3, np.float32)}, "scores is no array of 9 numbers"),
        ({"merges": None}, "merges is no array of strings"),
        ({"merges": "a b"}, "merges is no array of strings"),
        ({"merges": ["a b", "ab"]}, "not pairs"),
        ({"merges": ["a b c"]}, "not pairs"),
        ({"merges": ["a x"]}, "x"),
        ({"tokens": "abc"}, "tokens is no array of strings"),
        ({"tokens": 5}, "tokens is no array of strings"),
    ],
)  # fmt: skip
def test_metadata_that_do_not_fit_together_are_named_damaged(changes, says):
    with pytest.raises(CheckpointDamaged, match=says) as caught:
        build_tokenizer(small_byte_level(**changes), PATH)
    assert str(PATH) in caught.value.what


def test_strings_that_cannot_be_read_are_named_damaged():
    class Unreadable(list):
        def __iter__(self):
            raise ValueError("string 3 of 'tokens' is not UTF-8")

    with pytest.raises(CheckpointDamaged, match="string 3 of 'tokens' is not UTF-8"):
        build_tokenizer(small_byte_level(tokens=Unreadable("abc")), PATH)


def test_no_tokenizer_or_one_of_another_kind():
    metadata = small_byte_level()
    other = {**metadata, "tokenizer.ggml.model": "bert"}
    with pytest.raises(TextUnavailable, match="model is 'bert'; known are gpt2 and llama"):
        build_tokenizer(other, PATH)
    for missing in ("model", "tokens"):
        rest = {key: value for key, value in metadata.items() if key != v.PREFIX + missing}
        with pytest.raises(TextUnavailable, match="has no tokenizer"):
            build_tokenizer(rest, PATH)
    with pytest.raises(TextUnavailable, match="has no tokenizer"):
        build_tokenizer({**metadata, "tokenizer.ggml.model": np.array([1, 2])}, PATH)


@pytest.mark.parametrize("pre", ["from-the-future", 7])
def test_an_unknown_splitting_is_named_with_those_known(pre):
    with pytest.raises(TextUnavailable) as caught:
        build_tokenizer(small_byte_level(pre=pre), PATH)
    assert ascii(pre) in caught.value.why and ", ".join(sorted(SPLITTINGS)) in caught.value.why


def test_the_config_names_tokens_and_the_template():
    ids = {"bos_token_id": 0, "eos_token_id": 6, "padding_token_id": 2**32 - 1}
    metadata = {**small_byte_level(**ids), "tokenizer.chat_template": "{{ x }}"}
    config = tokenizer_config(metadata, PATH)
    assert config == {"bos_token": "a", "eos_token": "<|end|>", "chat_template": "{{ x }}"}
    assert tokenizer_config({}, PATH) == {}


@pytest.mark.parametrize("value", [9, -1, "1", 1.0, True, np.array([1], np.int32)])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "unknown_token_id"])
def test_ids_of_named_tokens_that_no_token_has(key, value):
    with pytest.raises(CheckpointDamaged, match=f"ggml.{key} is .*, and it has 9 tokens"):
        tokenizer_config(small_byte_level(**{key: value}), PATH)


def test_a_damaged_sentence_piece_setting_is_named():
    with pytest.raises(CheckpointDamaged, match="add_space_prefix is neither true nor false"):
        small_sentence_piece(add_space_prefix="false")
    with pytest.raises(CheckpointDamaged, match="unknown_token_id is 999"):
        small_sentence_piece(unknown_token_id=999)


@pytest.mark.parametrize("template", [5, True, np.array([1, 2], np.int32), ["a"]])
def test_a_template_that_is_no_text(template):
    metadata = {**small_byte_level(), "tokenizer.chat_template": template}
    with pytest.raises(CheckpointDamaged, match=r"chat_template is no string"):
        tokenizer_config(metadata, PATH)
