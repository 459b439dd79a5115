from __future__ import annotations

import json

import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.engine.model_files import FolderFiles
from moechat.engine.vendor_defaults import ignored_settings, vendor_defaults
from moechat.errors import CheckpointDamaged


def write(folder, config):
    (folder / "generation_config.json").write_text(json.dumps(config))


def test_mini_has_its_own_defaults():
    assert SamplingParams(**vendor_defaults(MINI)) == SamplingParams(temperature=0.6, top_p=0.95)


def test_no_file_is_neutral_and_no_sampling_is_greedy(tmp_path):
    assert vendor_defaults(tmp_path) == {}
    write(tmp_path, {"do_sample": False, "temperature": 0.9})
    assert vendor_defaults(tmp_path) == {"temperature": 0.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": "hot"},
        {"top_p": 7},
        {"top_k": [1]},
        {"do_sample": "false"},
        {"do_sample": 0},
        {"do_sample": []},
    ],
)
def test_a_value_that_cannot_be_used_names_the_file(tmp_path, bad):
    write(tmp_path, bad)
    with pytest.raises(CheckpointDamaged, match=r"generation_config\.json"):
        vendor_defaults(tmp_path)


def test_settings_that_are_not_followed_are_named(tmp_path):
    assert ignored_settings(MINI) == ignored_settings(tmp_path) == []
    assert FolderFiles(MINI).notice() == ""
    neutral = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "top_h": None}
    write(tmp_path, {**neutral, "min_new_tokens": 0, "num_beams": 1, "eos_token_id": 1})
    assert ignored_settings(tmp_path) == []
    write(tmp_path, {"typical_p": 0.9, "no_repeat_ngram_size": 3, "suppress_tokens": [5]})
    wanted = "no_repeat_ngram_size, suppress_tokens, typical_p"
    assert FolderFiles(tmp_path).notice().endswith(f"does not follow: {wanted}")
