"""How far a batch is: counts that its threads add to, and the words for them."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from moechat.sizes import duration_text

_CHUNK_BYTES = 1 << 20
_RATE_AFTER_SECONDS = 0.5  # before that a rate is noise


class Progress:
    """What a batch has done since this was made. Callable from any thread.

    ``num_lines``: lines in all, None where nobody knows.
    """

    def __init__(
        self, num_lines: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_lines, self.num_done, self.num_failed = num_lines, 0, 0
        self.num_tokens = 0  # sampled
        self._clock, self._began = clock, clock()
        self._lock = threading.Lock()

    def token(self) -> None:
        """A token was sampled."""
        with self._lock:
            self.num_tokens += 1

    def done(self) -> None:
        """A line is done whose answer is complete, or that asks nothing."""
        with self._lock:
            self.num_done += 1

    def failed(self) -> None:
        """A line is done that has no answer."""
        with self._lock:
            self.num_done += 1
            self.num_failed += 1

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return self._clock() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of all lines over wall time."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def text(self) -> str:
        """How far it is: lines, failures, rate, and the time left where it can be told."""
        # A file may grow while it is read.
        total = self.num_lines if (self.num_lines or 0) >= self.num_done else None
        done = f"{self.num_done:,} {_lines(self.num_done)}"
        if total is not None:
            done = f"{self.num_done:,} of {total:,} {_lines(total)}"
        parts = [done, f"{self.num_failed:,} failed"]
        if self.num_tokens and self.seconds >= _RATE_AFTER_SECONDS:
            parts.append(f"{self.tokens_per_second:,.0f} tok/s")
        if total is not None and 0 < self.num_done < total:
            left = self.seconds * (total - self.num_done) / self.num_done
            parts.append(f"about {duration_text(left)} left")
        return ", ".join(parts)

    def summary(self, num_results: int, num_failed: int) -> str:
        """What came out of it on one line, given how many results were written."""
        rate = f"{self.tokens_per_second:,.0f} tok/s"
        return (
            f"{num_results:,} {_lines(num_results)}, {num_failed:,} failed; "
            f"{self.num_tokens:,} tokens in {duration_text(self.seconds)}, {rate}"
        )

    def summary_json(self, num_results: int, num_failed: int) -> str:
        """The same as one JSON object."""
        return json.dumps(
            {
                "results": num_results,
                "failed": num_failed,
                "decode_tokens": self.num_tokens,
                "seconds": round(self.seconds, 6),
                "decode_tokens_per_second": round(self.tokens_per_second, 2),
            }
        )


def count_lines(source: BinaryIO) -> int | None:
    """Lines from where ``source`` stands, which is left there; None unless it is a file on disk.

    For a source of which nothing is buffered yet.
    """
    try:
        number = source.fileno()
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return None
        at, num_lines, last = os.lseek(number, 0, os.SEEK_CUR), 0, b"\n"
        while chunk := os.pread(number, _CHUNK_BYTES, at):
            num_lines += chunk.count(b"\n")
            at, last = at + len(chunk), chunk[-1:]
    except (OSError, ValueError):  # a stream of memory has no number
        return None
    return num_lines + (last != b"\n")


def _lines(number: int) -> str:
    return "line" if number == 1 else "lines"
