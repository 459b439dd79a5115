"""Files that are there whole or not at all."""

from __future__ import annotations

import os

import pytest

from moechat.whole_file import whole_file


@pytest.mark.parametrize("durable", [False, True])
def test_it_takes_the_place_of_an_older_one_at_the_end(tmp_path, durable):
    path = tmp_path / "file"
    path.write_bytes(b"older")
    with whole_file(path, durable) as file:
        file.write(b"newer")
        assert path.read_bytes() == b"older"
    assert path.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_was_raised_leaves_the_older_one_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"older")
    with pytest.raises(error), whole_file(path) as file:
        file.write(b"newer")
        raise error
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]
