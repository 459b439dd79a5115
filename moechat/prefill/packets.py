"""One layer's KV becomes a packet, on a thread of its own while the next layer is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moechat.errors import KVNotEncodable
from moechat.kv.packet import KVPacket, encode_packet
from moechat.kv.tiers import DROPPED, Tier
from moechat.prefill.job import PrefillJob
from moechat.prefill.span import LayerOutput


class PacketThread:
    """Does one thing after another; one may wait while one is under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Callable[[], bool] | None = None
        self._busy = False
        self._good = True
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-packets", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], bool]) -> bool:
        """Have ``send`` called, which says whether to go on; waits for room.

        False once an earlier one since the last flush() said no or failed: nothing more is called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None)
            if self._good:
                self._waiting = send
                self._changed.notify_all()
            return self._good

    def flush(self) -> bool:
        """Wait until all are done: whether none said no. Raises the first one's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._busy)
            good, error = self._good, self._error
            self._good, self._error = True, None
        if error is not None:
            raise error
        return good

    def close(self) -> None:
        """End the thread, which has nothing to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                send, self._waiting = self._waiting, None
                if send is None:
                    return
                self._busy = True
                self._changed.notify_all()
            good, error = False, None
            try:
                good = not self._good or send()
            except Exception as caught:  # whoever flushes gets it
                error = caught
            del send  # a layer's KV is not to live until the next one comes
            with self._changed:
                self._good, self._error = self._good and good, self._error or error
                self._busy = False
                self._changed.notify_all()


def encode_layer(
    job: PrefillJob, epoch: int, layer: int, positions: NDArray[np.int32], output: LayerOutput
) -> KVPacket:
    """One layer's packet, as the policy has it; the job's result counts it.

    When a value does not fit its tier, what the policy keeps of this layer crosses NATIVE.
    """
    started = time.perf_counter()
    num_tokens, mass_n = len(positions), output.window_mass_n
    tiers = job.policy.tiers(
        layer, int(positions[0]), num_tokens, None if mass_n is None else mass_n[-num_tokens:]
    )
    if tiers[-1] == DROPPED:  # how far the cache is complete shows by the last slot
        raise ValueError(f"the KV policy {job.policy.name} dropped the last token")
    cache, rows = job.cache, output.kv_TW

    def encode(tiers: NDArray[np.uint8]) -> KVPacket:
        return encode_packet(
            cache.session,
            epoch,
            layer,
            positions,
            rows,
            tiers,
            cache.layout,
            centre_keys=job.policy.centre_keys,
        )

    try:
        packet = encode(tiers)
    except KVNotEncodable:
        job.result.kv_native_layers += 1
        packet = encode(np.where(tiers == DROPPED, tiers, np.uint8(Tier.NATIVE)))
    job.result.kv_native_bytes += 2 * rows.size
    dropped = int(np.count_nonzero(tiers == DROPPED))
    job.result.kv_dropped_fraction += dropped / (cache.num_layers * len(job.ids))
    job.result.kv_encode_seconds += time.perf_counter() - started
    return packet
