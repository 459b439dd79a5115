"""Tests of decode/gpu/host_pieces.py: the GPU's way, its streams and events in order by hand."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from moechat.decode.gpu import host_pieces  # noqa: E402
from moechat.decode.gpu.host_pieces import HostPieces, bytes_of  # noqa: E402


class Queue:
    """What a stream has before it: a kernel runs only when somebody waits for it."""

    def __init__(self) -> None:
        self.work: list = []

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()

    def wait_stream(self, stream: Queue) -> None:
        assert stream is CALLER
        self.work.append(lambda: None)


class Event:
    """Waiting for it runs what was before it."""

    def __init__(self) -> None:
        self.before: Queue | None = None

    def record(self, stream: Queue) -> None:
        self.before = stream

    def synchronize(self) -> None:
        if self.before is not None:
            self.before.synchronize()


CALLER = Queue()


@pytest.fixture
def pieces(monkeypatch):
    """As on a GPU, on the CPU's memory."""
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 16)
    found = HostPieces(torch.device("cpu"))
    found._on_gpu, found._stream = True, Queue()
    found._free = [Event(), Event()]
    found._buffers = [torch.empty(16, dtype=torch.uint8) for _ in range(2)]

    class Cuda:
        current_stream = staticmethod(lambda device: CALLER)
        stream = staticmethod(lambda stream: contextlib.nullcontext())

    monkeypatch.setattr(host_pieces, "_cuda", Cuda)

    def later(out, source):
        found._stream.work.append(lambda: out.copy_(source))

    monkeypatch.setattr(host_pieces, "from_host", later)
    return found


def test_a_buffer_is_written_again_when_it_was_read(pieces):
    source = np.arange(100, dtype=np.uint8)
    there = torch.zeros(100, dtype=torch.uint8)
    with pieces.copying():
        assert len(list(pieces.copy(there, source))) == 7
        assert not torch.equal(there, torch.from_numpy(source))  # the last ones are under way
    assert torch.equal(there, torch.from_numpy(source))


def test_what_was_copied_is_there_when_somebody_stops(pieces):
    there = torch.zeros(64, dtype=torch.uint8)
    with pieces.copying():
        next(pieces.copy(there, np.full(64, 7, np.uint8)))
    assert there.tolist() == [7] * 16 + [0] * 48


def test_bytes_are_the_tensors_own():
    tensor = torch.zeros(3, 2)
    bytes_of(tensor[1]).fill_(255)
    assert tensor[1].isnan().all() and not tensor[[0, 2]].any()
