"""How far a batch is, in words, by a clock that the test sets."""

import io
import os

import pytest

from moechat.batch.progress import Progress, count_lines


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_line_has_counts_rate_and_the_time_left():
    clock = Clock()
    progress = Progress(600, clock)
    assert progress.text() == "0 of 600 lines, 0 failed"
    for _ in range(31):
        progress.done()
    for _ in range(2100):
        progress.token()
    clock.now += 10
    assert progress.text() == "31 of 600 lines, 0 failed, 210 tok/s, about 3 min left"
    progress.failed()
    progress.done()
    assert progress.text().startswith("33 of 600 lines, 1 failed, ")
    assert progress.summary(32, 1) == "32 lines, 1 failed; 2,100 tokens in 10 s, 210 tok/s"


@pytest.mark.parametrize("num_lines", [None, 1])
def test_without_a_total_or_past_it_no_time_is_promised(num_lines):
    progress = Progress(num_lines, Clock())
    progress.done()
    progress.done()
    assert progress.text() == "2 lines, 0 failed"


@pytest.mark.parametrize(
    ("seconds", "words"), [(2, "1.9 s"), (20, "19 s"), (300, "5 min"), (9000, "2.4 h")]
)
def test_the_time_left_has_a_unit_of_its_size(seconds, words):
    clock = Clock()
    progress = Progress(20, clock)
    progress.done()
    clock.now += seconds / 20
    assert progress.text().endswith(f"about {words} left")


@pytest.mark.parametrize(
    ("content", "num_lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)]
)
def test_lines_of_a_file_are_counted_from_where_it_stands(tmp_path, content, num_lines):
    path = tmp_path / "lines"
    path.write_bytes(b"before\n" + content)
    with path.open("rb", buffering=0) as file:
        file.readline()
        assert count_lines(file) == num_lines
        assert file.read() == content


def test_lines_of_a_pipe_or_of_memory_are_not_known():
    reader, writer = os.pipe()
    os.write(writer, b"a\n")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert count_lines(pipe) is None
        assert pipe.read() == b"a\n"
    assert count_lines(io.BytesIO(b"a\n")) is None
