"""Experts for steps on a GPU: a thread plays the GPU and posts requests through a mailbox."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from mailbox_client import MailboxClient

from moechat import _native
from moechat.engine.loading import load_model

MAX_ROWS = 16
NONE = _native.CancelFlag()


class Setting:
    """A server with mailboxes, and what the experts of the same model say when asked directly."""

    def __init__(self, folder, mailboxes=1, threads=2, compute="bf16"):
        self.model = load_model(folder, compute)
        if self.model.spec.moe is None:
            pytest.skip("a model without routed experts")
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


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_replies_have_the_bits_of_the_experts(pipeline_oracle, rows, compute):
    setting = Setting(pipeline_oracle, compute=compute)
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
