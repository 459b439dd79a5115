"""Sizes for people, and what the system refused."""

from __future__ import annotations

import errno
import os

import pytest

from moechat.errors import system_error_text
from moechat.sizes import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4_000_000, "4 MB")),
        *((999_499, "999 kB"), (999_500, "1 MB"), (5.81e9, "5.81 GB"), (1.03e15, "1030 TB")),
    ],
)
def test_three_digits_and_never_nothing(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize("name", ["/no/such", b"/no/such"])
def test_a_system_error_names_the_file_and_no_number(name):
    with pytest.raises(OSError) as caught:
        os.stat(name)
    assert system_error_text(caught.value) == "'/no/such': No such file or directory"


def test_a_system_error_without_a_file():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert system_error_text(full) == "the output cannot be written: No space left on device"
    assert system_error_text(OSError("odd")) == "odd" and system_error_text(OSError()) == "OSError"
