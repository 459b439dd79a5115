"""The arithmetic of admission: a session's bytes, and how many of them fit."""

from __future__ import annotations

import pytest

from moechat.engine.admission import admit, sessions_that_fit
from moechat.errors import DoesNotFit


@pytest.mark.parametrize(
    ("free", "fit"), [(None, None), (0, 0), (1111, 0), (1112, 1), (22222, 19), (22223, 20)]
)
def test_nine_tenths_of_the_memory_are_used(free, fit):
    assert sessions_that_fit(1000, free) == fit


def test_the_message_says_how_many_fit():
    admit(2, 10**6, 4096, 3 * 10**6)
    admit(100, 10**6, 4096, None)
    with pytest.raises(DoesNotFit) as caught:
        admit(3, 10**6, 4096, 3 * 10**6)
    assert caught.value.what == "3 conversations at once do not fit; 2 would"
    assert "1 MB" in caught.value.why and "4096" in caught.value.why and "3 MB" in caught.value.why
    assert "--concurrency 2" in caught.value.next_step
    with pytest.raises(DoesNotFit) as caught:
        admit(1, 10**6, 4096, 0)
    assert caught.value.next_step == "Try a smaller --ctx"
