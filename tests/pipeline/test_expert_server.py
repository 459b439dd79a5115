"""Experts for steps on a GPU: a thread plays the GPU and posts requests through a mailbox."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from mailbox_client import MailboxClient
from oracles import oracle_folder

from moechat import _native
from moechat.engine.loading import load_model

MAX_ROWS = 16
NONE = _native.CancelFlag()


@pytest.fixture
def moe_oracle():
    """A folder whose layers are all of experts, two of them at least."""
    return oracle_folder("gpt_oss_mxfp4")


class Setting:
    """A server with mailboxes, and what the experts of the same model say when asked directly."""

    def __init__(self, folder, mailboxes=1, threads=2, compute="bf16"):
        self.model = load_model(folder, compute)
        spec = self.spec = self.model.spec
        self.moe_layers = [i for i, layer in enumerate(spec.layers) if layer.moe]
        self.k = spec.moe.num_experts_per_token
        self.pool = _native.ThreadPool(threads)
        self.clients = [MailboxClient(MAX_ROWS, spec.hidden_size, self.k) for _ in range(mailboxes)]
        places = [client.place for client in self.clients]
        self.server = _native.ExpertServer(self.model.native, self.pool, places, MAX_ROWS)

    def inputs(self, seed, rows):
        random = np.random.default_rng([11, seed])
        x = random.standard_normal((rows, self.spec.hidden_size), np.float32)
        chosen = [random.permutation(self.spec.moe.num_experts)[: self.k] for _ in range(rows)]
        return x, np.array(chosen, np.int32), random.random((rows, self.k), np.float32)

    def expected(self, moe_layer, x, ids, weights):
        out = np.full_like(x, np.nan)
        experts = _native.Experts(self.model.native, self.pool)
        experts.run(self.moe_layers[moe_layer], x, ids, weights, out)
        return out

    def play(self, client, steps, rows, answers):
        """Post ``steps`` steps; append (MoE layer, inputs, y) of each request."""
        for step in range(steps):
            for layer in range(len(self.moe_layers)):
                inputs = self.inputs(1000 * rows + 10 * step + layer, rows)
                client.post(*inputs)
                y = client.wait()
                if y is None:
                    return
                answers.append((layer, inputs, y))


def in_thread(*call):
    thread = threading.Thread(target=call[0], args=call[1:], daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("oracle", ["deepseek_v3_fp8_odd", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_replies_have_the_bits_of_the_experts(oracle, rows, compute):
    setting = Setting(oracle_folder(oracle), compute=compute)
    assert setting.server.num_moe_layers == len(setting.moe_layers) >= 1
    answers = []
    gpu = in_thread(setting.play, setting.clients[0], 3, rows, answers)
    for _ in range(3):
        assert setting.server.serve(NONE, 10) == (0, "step")
    gpu.join()
    assert len(answers) == 3 * len(setting.moe_layers)
    for layer, inputs, y in answers:
        assert np.isfinite(y).all() and y.any()
        assert y.tobytes() == setting.expected(layer, *inputs).tobytes()
    times = setting.server.times
    assert times["num_requests"] == len(answers)
    assert times["experts_seconds"] > 0 and times["waiting_seconds"] > 0


def test_layout():
    layout = _native.mailbox_layout(max_rows=3, hidden=40, experts_per_token=5)
    assert layout == {
        "request": 0, "reply": 64, "abort": 128, "rows": 192, "x": 256,
        "ids": 768, "weights": 832, "y": 896, "total": 1408,
    }  # fmt: skip
    for wrong in ((0, 40, 5), (17, 40, 5), (1, 0, 5), (1, 40, 0), (1, 2**40, 5), (1, 40, -1)):
        with pytest.raises(_native.NativeError, match="mailbox"):
            _native.mailbox_layout(*wrong)


def test_two_mailboxes_take_turns(moe_oracle):
    """Steps of both, in any order; each gets the sums of its own inputs."""
    setting = Setting(moe_oracle, mailboxes=2)
    answers = [], []
    gpus = [
        in_thread(setting.play, client, 4, rows, own)
        for client, rows, own in zip(setting.clients, (2, 5), answers)
    ]
    steps = [setting.server.serve(NONE, 10) for _ in range(8)]
    for gpu in gpus:
        gpu.join()
    assert sorted(steps) == [(0, "step")] * 4 + [(1, "step")] * 4
    for own in answers:
        assert len(own) == 4 * len(setting.moe_layers)
        for layer, inputs, y in own:
            assert y.tobytes() == setting.expected(layer, *inputs).tobytes()


def test_the_oldest_request_is_answered_first(moe_oracle):
    setting = Setting(moe_oracle, mailboxes=3)
    first, second, third = setting.clients
    inputs = setting.inputs(1, 1)
    for client in (second, third):
        client.post(*inputs)
    assert setting.server.serve(NONE, 10, max_requests=1) == (None, "requests")
    assert (second.reply[0], third.reply[0]) == (1, 0)
    for client in (first, second):  # newer than the third's, which has been seen
        client.post(*inputs)
    setting.server.serve(NONE, 10, max_requests=1)
    assert (first.reply[0], third.reply[0]) == (0, 1)


def test_the_count_goes_round(moe_oracle):
    setting = Setting(moe_oracle)
    (client,), layers = setting.clients, len(setting.moe_layers)
    assert layers > 1
    client.sequence = 2**32 - 2
    setting.server.reset(0, client.sequence)
    assert (client.request[0], client.reply[0]) == (2**32 - 2, 2**32 - 2)
    answers = []
    gpu = in_thread(setting.play, client, 3, 2, answers)
    assert [setting.server.serve(NONE, 10) for _ in range(3)] == [(0, "step")] * 3
    gpu.join()
    assert client.reply[0] == 3 * layers - 2
    for layer, inputs, y in answers:
        assert y.tobytes() == setting.expected(layer, *inputs).tobytes()


def test_experts_of_the_gpu_are_left_out(moe_oracle):
    """What is left are the other experts' bits; with all of them on the GPU, zeros."""
    setting = Setting(moe_oracle)
    (client,), experts = setting.clients, setting.spec.moe.num_experts
    x, ids, weights = setting.inputs(5, 4)
    on_gpu = [int(id_) for id_ in ids[1]] + [int(ids[0, 0])]
    for moe_layer, chosen in ((0, on_gpu), (1, np.arange(experts, dtype=np.int32)), (1, [])):
        setting.server.set_gpu_experts(moe_layer, chosen)
    steps = []
    gpu = in_thread(setting.play, client, 1, 1, steps)  # one row, all layers: the mask is by layer
    setting.server.serve(NONE, 10)
    gpu.join()
    for layer, inputs, y in steps[1:]:
        assert y.tobytes() == setting.expected(layer, *inputs).tobytes()
    client.post(x, ids, weights)
    setting.server.serve(NONE, 10, max_requests=1)
    y = client.wait()
    for row in range(4):
        kept = [k for k in range(setting.k) if ids[row, k] not in on_gpu]
        own = x[row : row + 1], ids[row : row + 1, kept], weights[row : row + 1, kept]
        expected = setting.expected(0, *own) if kept else np.zeros_like(own[0])
        assert y[row : row + 1].tobytes() == expected.tobytes()
    assert not y[1].any() and any(y[row].any() for row in (0, 2, 3))
    for wrong in (-1, experts):
        with pytest.raises(_native.NativeError, match="expert id"):
            setting.server.set_gpu_experts(0, [wrong])
    with pytest.raises(_native.NativeError, match="layer"):
        setting.server.set_gpu_experts(len(setting.moe_layers), [0])


def test_a_row_that_is_not_a_number_harms_no_other(moe_oracle):
    setting = Setting(moe_oracle)
    x, ids, weights = setting.inputs(6, 3)
    clean = setting.expected(0, x, ids, weights)
    x[1], weights[2] = np.nan, np.nan
    setting.clients[0].post(x, ids, weights)
    setting.server.serve(NONE, 10, max_requests=1)
    y = setting.clients[0].wait()
    assert y[0].tobytes() == clean[0].tobytes()
    assert np.isnan(y[1:]).all()


def rows_of(count):
    return lambda client: client.rows.view(np.int32).__setitem__(0, count)


def id_of(value):
    return lambda client: client.ids.__setitem__((1, 0), value)


def skip_one(client):
    client.request[0] += 1


def go_back(client):
    client.request[0] = 2**32 - 1


HOSTILE = {
    "no rows": (rows_of(0), "number of rows"),
    "too many rows": (rows_of(17), "number of rows"),
    "negative rows": (rows_of(-1), "number of rows"),
    "an id below": (id_of(-1), "expert id"),
    "an id above": (id_of(2**31 - 1), "expert id"),
    "an id twice": (lambda client: client.ids.__setitem__(1, 0), "twice"),
    "a request left out": (skip_one, "not the next"),
    "an old request": (go_back, "not the next"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_garbage_is_refused_and_frees_the_client(moe_oracle, case):
    damage, why = HOSTILE[case]
    setting = Setting(moe_oracle, mailboxes=2)
    client, other = setting.clients
    client.post(*setting.inputs(2, 2))
    damage(client)
    with pytest.raises(_native.NativeError, match=why) as failure:
        setting.server.serve(NONE, 10)
    assert failure.value.args[0] == "mailbox-refused" and "mailbox 0" in failure.value.args[1]
    assert client.abort[0] == 1 and not client.y.any()
    assert setting.server.aborted(0) and not setting.server.aborted(1)
    # The other client is served as before, and this one once it was reset.
    answers = []
    gpu = in_thread(setting.play, other, 1, 2, answers)
    assert setting.server.serve(NONE, 10) == (1, "step")
    gpu.join()
    setting.server.reset(0)
    client.sequence = 0
    gpu = in_thread(setting.play, client, 1, 2, answers)
    assert setting.server.serve(NONE, 10) == (0, "step")
    gpu.join()
    assert len(answers) == 2 * len(setting.moe_layers)


def test_a_dead_client_costs_the_timeout(moe_oracle):
    setting = Setting(moe_oracle)
    began, cpu_began = time.monotonic(), time.thread_time()
    assert setting.server.serve(NONE, 0.2) == (None, "timeout")
    assert 0.2 <= time.monotonic() - began < 2
    assert time.thread_time() - cpu_began < 0.15  # it sleeps between looks
    setting.clients[0].post(*setting.inputs(3, 1))  # and may yet come to life
    assert setting.server.serve(NONE, 0, max_requests=1) == (None, "requests")


def test_interrupt_leaves_the_request_for_later(moe_oracle):
    setting = Setting(moe_oracle)
    (client,), flag = setting.clients, _native.CancelFlag()
    inputs = setting.inputs(4, 2)
    client.post(*inputs)
    flag.raise_()
    assert setting.server.serve(flag, 10) == (None, "interrupt")
    assert client.reply[0] == 0 and not client.abort[0]
    flag.clear()
    setting.server.serve(flag, 10, max_requests=1)
    assert client.wait().tobytes() == setting.expected(0, *inputs).tobytes()
    waiting = threading.Timer(0.05, flag.raise_)
    waiting.start()
    assert setting.server.serve(flag, 10) == (None, "interrupt")
    waiting.join()


def test_abort_frees_client_and_server(moe_oracle):
    setting = Setting(moe_oracle, mailboxes=2)
    (client, _), answers = setting.clients, []
    setting.server.abort(0)
    gpu = in_thread(setting.play, client, 1, 1, answers)
    gpu.join(10)
    assert not gpu.is_alive() and answers == []
    threading.Timer(0.05, setting.server.abort, [1]).start()
    assert setting.server.serve(NONE, 10) == (None, "aborted")


def test_one_thread_at_a_time(moe_oracle):
    setting = Setting(moe_oracle)
    flag, started = _native.CancelFlag(), threading.Event()

    def serve():
        started.set()
        setting.server.serve(flag, 10)

    server = in_thread(serve)
    started.wait()
    time.sleep(0.05)
    for call in (
        lambda: setting.server.serve(NONE, 0),
        lambda: setting.server.reset(0),
        lambda: setting.server.set_gpu_experts(0, []),
    ):
        with pytest.raises(_native.NativeError, match="in use"):
            call()
    flag.raise_()
    server.join()


def test_memory_is_checked(moe_oracle):
    setting = Setting(moe_oracle)
    address, size = setting.clients[0].place
    for places, why in (
        ([], "needs a mailbox"),
        ([(0, size)], "multiple of 64"),
        ([(address + 4, size)], "multiple of 64"),
        ([(address, size - 1)], "bytes"),
    ):
        with pytest.raises(_native.NativeError, match=why):
            _native.ExpertServer(setting.model.native, setting.pool, places, MAX_ROWS)
    for call in (setting.server.abort, setting.server.aborted, setting.server.reset):
        for wrong in (-1, 1):
            with pytest.raises(_native.NativeError, match="mailbox out of range"):
                call(wrong)


def test_a_dense_model_has_no_experts_to_serve():
    model = load_model(oracle_folder("mistral_swa"), "bf16")
    client = MailboxClient(1, model.spec.hidden_size, 1)
    pool = _native.ThreadPool(1)
    with pytest.raises(_native.NativeError, match="one expert"):
        _native.ExpertServer(model.native, pool, [client.place], 1)
