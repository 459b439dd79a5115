"""A thread that serves routed experts while the decode thread samples and starts steps."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future

from moechat import _native
from moechat.decode.gpu.one_thread import OneThread
from moechat.decode.gpu.ops import Mailbox
from moechat.decode.gpu.step_inputs import MAX_ROWS

_LOOK_SECONDS = 0.2  # how long no request may come before somebody looks why


class ExpertThread:
    """The server of some mailboxes. Between start() and stop() it answers what lanes ask."""

    def __init__(
        self, model: _native.Model, pool: _native.ThreadPool, mailboxes: Sequence[Mailbox]
    ) -> None:
        self._memory = [mailbox.memory for mailbox in mailboxes]  # must outlive the server
        places = [(memory.data_ptr(), memory.numel()) for memory in self._memory]
        self.server = _native.ExpertServer(model, pool, places, MAX_ROWS)
        self._thread = OneThread("hybrid-experts")
        self._serving: Future[None] | None = None
        self._stop = _native.CancelFlag()
        self._ended: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.failure: Exception | None = None  # what the server threw since start()

    def start(self) -> None:
        """Begin to serve; mailboxes are as new, or between two steps."""
        self._stop.clear()
        self._ended, self.failure = queue.SimpleQueue(), None
        self._serving = self._thread.submit(self._serve)

    def stop(self) -> None:
        """Serve no more; a request at hand is as if it had not come."""
        if self._serving is not None:
            self._stop.raise_()
            self._serving.result()
            self._serving = None

    def ended(self, timeout_seconds: float) -> tuple[int | None, bool]:
        """(the mailbox that has got all of a step, whether to look at the lanes: nobody asks).

        After the timeout (None, False). Raises what the server threw.
        """
        try:
            what = self._ended.get(timeout=timeout_seconds)
        except queue.Empty:
            return None, False
        if isinstance(what, BaseException):
            raise what
        return what, what is None

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.close()

    def _serve(self) -> None:
        why = ""
        try:
            while why not in ("interrupt", "aborted"):
                number, why = self.server.serve(self._stop, _LOOK_SECONDS)
                if why != "interrupt":
                    self._ended.put(number)
        except Exception as error:  # told to the decode thread
            self.failure = error
            self._ended.put(error)
