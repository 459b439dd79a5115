"""How long the rest takes."""

from __future__ import annotations

import pytest

from moechat.eval.progress import Progress


@pytest.mark.parametrize(
    ("seconds", "done", "left"),
    [
        (2, 50, ""),  # too early
        (10, 0, ""),
        (10, 50, ", about 10 s left"),
        (10, 100, ", about 1.0 s left"),
        (100, 25, ", about 5 min left"),
        (3600, 10, ", about 9.0 h left"),
    ],
)
def test_the_rest_takes_as_long_as_what_was_done(seconds, done, left):
    now = [7.0]
    progress = Progress(100, lambda: now[0])
    progress.add(done)
    now[0] += seconds
    assert progress.left == left
