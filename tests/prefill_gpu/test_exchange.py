"""Exchanges between lanes: what has to wait for what on GPUs, and lanes that fail or are empty."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from queued_cuda import QueuedCuda  # noqa: E402

from moechat.prefill.gpu import exchange as exchange_module  # noqa: E402
from moechat.prefill.gpu import lanes as lanes_module  # noqa: E402
from moechat.prefill.gpu.exchange import (  # noqa: E402
    ByHost,
    Exchange,
    PeerAccess,
    SameDevice,
    routes_between,
)
from moechat.prefill.gpu.lanes import LaneStopped, run_lanes, zigzag  # noqa: E402

GPUS = [torch.device("cuda", index) for index in range(3)]
SIZE = 999


def queued(monkeypatch: pytest.MonkeyPatch, *, peers: bool) -> QueuedCuda:
    cuda = QueuedCuda(peers)
    monkeypatch.setattr(exchange_module, "_cuda", cuda)
    monkeypatch.setattr(ByHost.__init__, "__defaults__", (64,))
    monkeypatch.setattr(
        exchange_module, "host_buffer", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **settings: cuda.copy(*args))
    return cuda


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_copies_come_after_their_source_and_before_its_memory_goes(
    monkeypatch: pytest.MonkeyPatch, peers: bool, seed: int, fails: bool
) -> None:
    """``fails``: the lane does not come to use what it fetched."""
    cuda = queued(monkeypatch, peers=peers)
    exchange = Exchange(GPUS[:2])
    want = torch.arange(SIZE, dtype=torch.float32)
    found, memory = {}, []
    for layer in range(2):  # the second one reuses the buffers
        source, out = torch.zeros(SIZE), torch.zeros(SIZE)
        cuda.put(lambda out=out: out.fill_(-1), GPUS[1])  # what was there before
        cuda.put(lambda source=source, layer=layer: source.copy_values(want + layer), GPUS[0])
        exchange.offer(0, "x", source)
        done = exchange.fetch(1, 0, "x", slice(3, None), out[3:])
        if not fails:
            exchange.arrived(1, done)

        def look(out: torch.Tensor = out, layer: int = layer) -> None:
            found[layer] = out.clone()

        cuda.put(look, GPUS[1])
        exchange.end_layer()
        cuda.put(lambda source=source: source.fill_(-2), GPUS[0])  # the memory is another's
        cuda.put(lambda out=out: out.fill_(-3), GPUS[1])
        memory += [(source, -2), (out, -3)]
    cuda.run(seed)
    for tensor, value in memory:
        assert (tensor == value).all()
    for layer in range(0 if fails else 2):
        assert torch.equal(found[layer][3:], want[3:] + layer)
        assert (found[layer][:3] == -1).all()


@pytest.mark.parametrize("peers", [True, False])
def test_spans_that_share_routes_make_no_more_streams(
    monkeypatch: pytest.MonkeyPatch, peers: bool
) -> None:
    """torch would hand out the stream of weight copies again, and tokens would wait for these."""
    cuda = queued(monkeypatch, peers=peers)
    routes = routes_between(GPUS[:2])
    count = len(cuda.streams)
    for seed in range(3):
        exchange, out = Exchange(GPUS[:2], routes), torch.zeros(SIZE)
        exchange.offer(0, "x", torch.full((SIZE,), 1.0 + seed))
        exchange.arrived(1, exchange.fetch(1, 0, "x", slice(0, SIZE), out))
        exchange.end_layer()
        cuda.run(seed)
        assert (out == 1 + seed).all()
    assert len(cuda.streams) == count


def test_buffers_are_all_there_or_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queued(monkeypatch, peers=False)
    route, make, made = ByHost(*GPUS[:2]), exchange_module.host_buffer, []

    def third_fails(size: int) -> torch.Tensor:
        made.append(size)
        if len(made) == 3:
            raise RuntimeError("no page-locked memory")
        return make(size)

    monkeypatch.setattr(exchange_module, "host_buffer", third_fails)
    with pytest.raises(RuntimeError, match="page-locked"):
        route._next_buffer()
    assert len({route._next_buffer()[0].data_ptr() for _ in range(8)}) == 4


@pytest.fixture(autouse=True)
def values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor.copy_ as it was, for the work of a lane itself."""
    monkeypatch.setattr(torch.Tensor, "copy_values", torch.Tensor.copy_, raising=False)


@pytest.mark.parametrize("peers,allowed,route", [
    (True, True, PeerAccess), (True, False, ByHost), (False, True, ByHost)
])  # fmt: skip
def test_which_way_tensors_go(
    monkeypatch: pytest.MonkeyPatch, peers: bool, allowed: bool, route: type
) -> None:
    queued(monkeypatch, peers=peers)
    devices = [GPUS[0], GPUS[1], GPUS[0]]
    exchange = Exchange(devices, routes_between(devices, peer_access=allowed))
    kinds = {pair: type(way) for pair, way in exchange._routes.items()}
    assert kinds[0, 1] is kinds[1, 0] is kinds[2, 1] is route
    assert kinds[0, 2] is kinds[2, 0] is SameDevice


def test_pieces_by_way_of_the_host_need_a_few_buffers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued(monkeypatch, peers=False)
    way = ByHost(GPUS[0], GPUS[1], 64)
    for _ in range(2):
        way.copy(torch.zeros(SIZE), torch.ones(SIZE), exchange_module.mark(GPUS[0]))
    assert len(way._buffers) == exchange_module.HOST_BUFFERS
    assert {len(buffer) for buffer, _, _ in way._buffers} == {64}


def test_a_fetch_waits_for_its_offer() -> None:
    exchange, out = Exchange([torch.device("cpu")] * 2), torch.zeros(5)
    offer = threading.Timer(0.05, exchange.offer, (0, "x", torch.arange(7.0)))
    offer.start()
    exchange.offer(0, "y", torch.zeros(7))
    exchange.fetch(1, 0, "x", slice(1, 6), out)
    assert out.tolist() == [1, 2, 3, 4, 5]
    offer.join()


def test_stop_ends_waits_and_later_ones() -> None:
    exchange, out = Exchange([torch.device("cpu")] * 2), torch.zeros(5)
    threading.Timer(0.05, exchange.stop).start()
    for _ in range(2):
        with pytest.raises(LaneStopped):
            exchange.fetch(1, 0, "x", slice(0, 5), out)


def test_offers_end_with_their_layer() -> None:
    exchange, out = Exchange([torch.device("cpu")] * 2), torch.zeros(1)
    exchange.offer(0, "x", torch.zeros(1))
    exchange.end_layer()
    threading.Timer(0.05, exchange.offer, (0, "x", torch.ones(1))).start()
    exchange.fetch(1, 0, "x", slice(0, 1), out)
    assert out.tolist() == [1]


@pytest.mark.parametrize("lanes", range(1, 5))
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 1000, 1001])
def test_every_token_is_in_one_lane(tokens: int, lanes: int) -> None:
    plan = zigzag(tokens, lanes)
    covered = [t for chunks in plan for c in chunks for t in range(c.span.start, c.span.stop)]
    assert sorted(covered) == list(range(tokens))
    for chunks in plan:
        own = [t for chunk in chunks for t in range(chunk.own.start, chunk.own.stop)]
        assert own == list(range(sum(len(chunk) for chunk in chunks)))
        assert all(
            len(chunk) == chunk.own.stop - chunk.own.start and len(chunk) for chunk in chunks
        )
        assert len(chunks) <= 2
    assert lanes > 1 or len(plan[0]) == 1


def test_lanes_have_the_same_share_of_causal_attention() -> None:
    for lanes in (2, 3, 8):
        work = [
            sum(t + 1 for c in chunks for t in range(c.span.start, c.span.stop))
            for chunks in zigzag(4800, lanes)
        ]
        assert max(work) == min(work)


def test_a_lane_without_a_thread_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, ended = threading.Event(), []

    def waits() -> None:
        ended.append(stopped.wait(10))
        raise LaneStopped("another one failed")

    thread = lanes_module._thread

    def none_for_the_last(lane: int) -> ThreadPoolExecutor:
        if lane == 2:
            raise RuntimeError("can't start new thread")
        return thread(lane)

    monkeypatch.setattr(lanes_module, "_thread", none_for_the_last)
    with pytest.raises(RuntimeError, match="new thread"):
        run_lanes([waits, waits, waits], stopped.set)
    assert ended == [True]


def test_the_first_error_that_has_a_reason_is_raised() -> None:
    stopped = threading.Event()

    def waits() -> int:
        assert stopped.wait(10)
        raise LaneStopped("another one failed")

    def fails() -> int:
        raise OSError("the file has gone")

    for tasks in ([waits, waits, fails], [fails, waits, waits], [waits, fails, fails]):
        stopped.clear()
        with pytest.raises(OSError, match="gone"):
            run_lanes(tasks, stopped.set)
    assert run_lanes([lambda: 1, lambda: 2], stopped.set) == [1, 2]
