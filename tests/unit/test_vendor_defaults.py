from __future__ import annotations

import json

import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.engine.vendor_defaults import vendor_defaults
from moechat.errors import CheckpointDamaged


def write(folder, config):
    (folder / "generation_config.json").write_text(json.dumps(config))


def test_mini_has_its_own_defaults():
    assert SamplingParams(**vendor_defaults(MINI)) == SamplingParams(temperature=0.6, top_p=0.95)


def test_no_file_is_neutral_and_no_sampling_is_greedy(tmp_path):
    assert vendor_defaults(tmp_path) == {}
    write(tmp_path, {"do_sample": False, "temperature": 0.9})
    assert vendor_defaults(tmp_path) == {"temperature": 0.0}


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": [1]}])
def test_a_value_that_cannot_be_used_names_the_file(tmp_path, bad):
    write(tmp_path, bad)
    with pytest.raises(CheckpointDamaged, match=r"generation_config\.json"):
        vendor_defaults(tmp_path)
