"""Windows that are page-locked, and the CUDA copies with a driver that only keeps a record."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from moechat import _native
from moechat.weights.mapped import map_files

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.prefill.gpu import transfer as transfer_module  # noqa: E402
from moechat.prefill.gpu.register import Registrar  # noqa: E402
from moechat.prefill.gpu.transfer import CudaPageLock, CudaTransfer  # noqa: E402

PAGE = mmap.PAGESIZE
WINDOW = 4 * PAGE
SIZE = 2 * WINDOW + PAGE + 100


class Record:
    """A driver that grants all windows but some."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.refused = refused

    def lock(self, address: int, size_bytes: int) -> bool:
        self.calls += 1
        assert address % PAGE == 0 and size_bytes % PAGE == 0
        if self.calls - 1 in self.refused:
            return False
        self.locked[address] = size_bytes
        return True

    def unlock(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def content(tmp_path: Path) -> np.ndarray:
    file = tmp_path / "weights"
    file.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return next(iter(map_files([file])))[1]


def test_windows_are_locked_at_first_use_and_kept(content: np.ndarray) -> None:
    record = Record()
    registrar = Registrar(record, limit_bytes=1 << 40, window_bytes=WINDOW)
    view = content[10 : WINDOW - 3].reshape(-1, 1).view(np.int8).view(np.uint8).reshape(-1)
    assert list(registrar.spans(view)) == [(0, len(view), True)]
    base = content.ctypes.data
    assert record.locked == {base: WINDOW} and registrar.registered_bytes == WINDOW
    whole = list(registrar.spans(content[WINDOW - 5 :]))
    assert whole == [(0, 5, True), (5, 5 + WINDOW, True), (5 + WINDOW, SIZE - WINDOW + 5, True)]
    # The last window ends with the mapping's last page.
    assert record.locked == {base: WINDOW, base + WINDOW: WINDOW, base + 2 * WINDOW: 2 * PAGE}
    list(registrar.spans(content))
    assert record.calls == 3
    registrar.close()
    assert record.locked == {} and registrar.registered_bytes == 0


def test_what_is_refused_or_beyond_the_limit_is_not_asked_for_again(content: np.ndarray) -> None:
    record = Record(refused=(0,))
    registrar = Registrar(record, limit_bytes=WINDOW + PAGE, window_bytes=WINDOW)
    for _ in range(2):
        locked = [locked for _, _, locked in registrar.spans(content)]
        assert locked == [False, True, False]
    assert record.calls == 2 and registrar.registered_bytes == WINDOW
    registrar.close()
    assert record.locked == {}


def test_memory_that_is_no_mapping_is_not_locked() -> None:
    record = Record()
    registrar = Registrar(record, limit_bytes=1 << 40, window_bytes=WINDOW)
    assert list(registrar.spans(np.zeros(3 * WINDOW, np.uint8))) == [(0, 3 * WINDOW, False)]
    assert record.calls == 0


def test_a_mapping_stays_while_it_is_locked(content: np.ndarray) -> None:
    registrar = Registrar(Record(), limit_bytes=1 << 40, window_bytes=WINDOW)
    list(registrar.spans(content[:1]))
    assert [window.content is content for window in registrar._windows.values()] == [True]


def test_windows_are_locked_ahead_of_their_use(content: np.ndarray) -> None:
    record, entered = Record(), []
    registrar = Registrar(record, limit_bytes=1 << 40, window_bytes=WINDOW)
    for _ in range(2):  # once
        registrar.lock_ahead([content[:1], content[-1:]], lambda: entered.append(1))
    assert registrar._ahead is not None
    registrar._ahead.join()
    assert entered == [1] and len(record.locked) == 2
    assert list(registrar.spans(content[:5])) == [(0, 5, True)] and record.calls == 2
    registrar.close()
    assert record.locked == {}


@pytest.mark.parametrize("where", ["enter", "lock"])
def test_a_driver_that_fails_ahead_is_left_to_whoever_copies(
    content: np.ndarray, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Record):
        def lock(self, address: int, size_bytes: int) -> bool:
            raise RuntimeError("the device has gone")

    def enter() -> None:
        if where == "enter":
            raise RuntimeError("the device has gone")

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    registrar = Registrar(Failing(), limit_bytes=1 << 40, window_bytes=WINDOW)
    registrar.lock_ahead([content], enter)
    assert registrar._ahead is not None
    registrar._ahead.join()
    assert not shown and registrar.registered_bytes == 0
    with pytest.raises(RuntimeError, match="gone"):
        list(registrar.spans(content[-1:]))
    registrar.close()


def test_a_window_that_is_being_locked_is_waited_for(content: np.ndarray) -> None:
    class Slow(Record):
        def lock(self, address: int, size_bytes: int) -> bool:
            started.set()
            assert goes_on.wait(10)
            return super().lock(address, size_bytes)

    started, goes_on = threading.Event(), threading.Event()
    registrar = Registrar(Slow(), limit_bytes=1 << 40, window_bytes=WINDOW)
    registrar.lock_ahead([content[:1]], lambda: None)
    assert started.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    assert list(registrar.spans(content[:1])) == [(0, 1, True)]
    registrar.close()


class _Point:
    cuda_stream = 0

    """A stream and an event at once: everything is over at once."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        pass

    def synchronize(self) -> None: ...
    def record(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def elapsed_time(self, other: object) -> float:
        return 250.0


class _Cuda:
    """As much of torch.cuda as the copies use, and a runtime that refuses."""

    Stream = Event = _Point
    result = 0
    registered: ClassVar[list[int]] = []
    pieces: ClassVar[list[int]] = []
    current: ClassVar[list[object]] = []

    @staticmethod
    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        yield

    @classmethod
    @contextmanager
    def device(cls, device: object) -> Iterator[None]:
        cls.current.append(device)
        yield
        cls.current.pop()

    @classmethod
    def cudart(cls) -> type[_Cuda]:
        return cls

    @classmethod
    def cudaHostRegister(cls, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 8 | 1
        if cls.result == 0:
            cls.registered.append(address)
        return cls.result

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:
        cls.registered.remove(address)
        return 0


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> type[_Cuda]:
    monkeypatch.setattr(transfer_module, "_cuda", _Cuda)
    monkeypatch.setattr(
        CudaTransfer, "host_buffer", lambda self, size: torch.empty(size, dtype=torch.uint8)
    )
    _Cuda.pieces = []
    monkeypatch.setattr(transfer_module, "_copy_function", lambda: COPY_ADDRESS)
    return _Cuda


COPY_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)


@COPY_TYPE
def copy_now(target: int, source: int, num_bytes: int, stream: int | None) -> int:
    ctypes.memmove(target, source, num_bytes)
    _Cuda.pieces.append(num_bytes)
    return 700 if stream == REFUSING else 0


COPY_ADDRESS = ctypes.cast(copy_now, ctypes.c_void_p).value
REFUSING = 99


def test_copies_in_one_call_stay_inside_and_errors_are_told() -> None:
    target = np.zeros(100, np.uint8)
    source = np.arange(50, dtype=np.uint8)
    given = COPY_ADDRESS, target.ctypes.data, target.nbytes
    _native.copy_pieces(*given, [(50, source), (0, source[:10])], 7, 0)
    assert (target[50:] == source).all() and (target[:10] == source[:10]).all()
    assert not target[10:50].any()
    for begin in (51, -1, 1 << 62):
        with pytest.raises(_native.NativeError, match="leave its target"):
            _native.copy_pieces(*given, [(begin, source)], 7, 0)
    for piece_bytes, rows in ((0, source), (-1, source), (7, source[::2])):
        with pytest.raises(_native.NativeError):
            _native.copy_pieces(*given, [(0, rows)], piece_bytes, 0)
    with pytest.raises(_native.NativeError, match="CUDA error 700"):
        _native.copy_pieces(*given, [(0, source)], 7, REFUSING)


@pytest.mark.parametrize("refused,staged", [((), 0), ((1,), WINDOW), ((0, 1, 2), SIZE - 7)])
def test_bytes_arrive_straight_or_by_way_of_buffers(
    content: np.ndarray, fake_cuda: type[_Cuda], refused: tuple[int, ...], staged: int
) -> None:
    registrar = Registrar(Record(refused), limit_bytes=1 << 40, window_bytes=WINDOW)
    copies = CudaTransfer(torch.device("cpu"), registrar, piece_bytes=1000)
    target = torch.zeros(SIZE - 7, dtype=torch.uint8)
    copies.copy(target, [(0, content[7:20]), (13, content[20:])])
    assert (target.numpy() == content[7:]).all()
    assert copies.staged_bytes == staged
    assert sum(fake_cuda.pieces) == SIZE - 7 - staged
    assert max(fake_cuda.pieces, default=0) <= 1000
    assert copies.seconds(copies.copy_mark(), copies.copy_mark()) == 0.25
    copies.close()
    assert registrar.registered_bytes == 0


def test_close_unlocks_on_its_device_though_that_has_failed(
    content: np.ndarray, fake_cuda: type[_Cuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    registrar = Registrar(CudaPageLock(device), limit_bytes=1 << 40, window_bytes=WINDOW)
    copies = CudaTransfer(device, registrar)
    copies.copy(torch.zeros(SIZE, dtype=torch.uint8), [(0, content)])
    unregister, current = _Cuda.cudaHostUnregister, []

    def recorded(address: int) -> int:
        current.append(list(_Cuda.current))
        return unregister(address)

    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fake_cuda, "cudaHostUnregister", recorded)
    monkeypatch.setattr(copies.stream, "synchronize", failed)
    assert fake_cuda.registered
    copies.close()
    assert not fake_cuda.registered and current == [[device]] * 3


@pytest.mark.parametrize("result", [0, 712])
def test_what_the_runtime_says_of_a_window(fake_cuda: type[_Cuda], result: int) -> None:
    fake_cuda.result = result
    try:
        lock = CudaPageLock(torch.device("cpu"))
        assert lock.lock(0, PAGE) == (result == 0)
        assert fake_cuda.registered == [0] * (result == 0)
        if result == 0:
            lock.unlock(0)
        assert not fake_cuda.registered
    finally:
        fake_cuda.result = 0


def test_devices_share_what_is_locked(content: np.ndarray, fake_cuda: type[_Cuda]) -> None:
    """The driver refuses memory that is locked already, for another device, too."""
    registrars = [
        Registrar(CudaPageLock(torch.device("cpu")), limit_bytes=1 << 40, window_bytes=WINDOW)
        for _ in range(2)
    ]
    base = content.ctypes.data
    assert list(registrars[0].spans(content[: WINDOW + 1])) == [
        (0, WINDOW, True),
        (WINDOW, WINDOW + 1, True),
    ]
    assert list(registrars[1].spans(content[:1])) == [(0, 1, True)]
    assert fake_cuda.registered == [base, base + WINDOW]
    registrars[0].close()
    assert fake_cuda.registered == [base]
    registrars[1].close()
    assert not fake_cuda.registered
