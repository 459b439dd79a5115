"""Two parts of a GPU's multiprocessors: decode's, and a prompt's.

A prompt's kernels hold the multiprocessors that they are on for milliseconds, whatever the
priority of decode's stream. So while both are at work, each has a part of its own: green contexts
of the CUDA driver (CUDA driver API, section "Green Contexts", of driver 12.4 and later).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

DECODE_FRACTION = 3  # decode gets one of so many, rounded as the driver has it
_PAUSE_SECONDS = 0.5  # between two steps, or two layers, at most
_SM_RESOURCE, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1  # of the driver's enumerations
_RESOURCE_BYTES = 1024  # more than a CUdevResource of any version has


@dataclass(frozen=True)
class Parts:
    """A stream on each part."""

    decode: Any
    prompt: Any


class GpuSharing:
    """Who is at work on a GPU, and where.

    The prefill thread says when it is at a layer, the decode thread when it steps. Without parts
    (off CUDA, or an older driver) both have the whole device.
    """

    def __init__(self, device: torch.device, make: Callable[[torch.device], Parts] | None = None):
        self.parts: Parts | None = None
        if make is not None or device.type == "cuda":
            with contextlib.suppress(OSError, AttributeError, RuntimeError):
                self.parts = (make or partition)(device)
        self._layers, self._left_layer, self._last_step = 0, -_PAUSE_SECONDS, -_PAUSE_SECONDS

    @property
    def beside_a_prompt(self) -> bool:
        """Whether a step is to stay in decode's part. From the decode thread."""
        self._last_step = time.monotonic()
        at_work = self._layers > 0 or self._last_step - self._left_layer < _PAUSE_SECONDS
        return self.parts is not None and at_work

    @contextlib.contextmanager
    def layer(self) -> Iterator[None]:
        """A layer of a prompt: asked of the prompt's part, if decode is at work, too."""
        self._layers += 1
        try:
            decodes = time.monotonic() - self._last_step < _PAUSE_SECONDS
            if self.parts is None or not decodes:
                yield
            else:
                with _on(self.parts.prompt):
                    yield
        finally:
            self._left_layer = time.monotonic()
            self._layers -= 1


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """``stream``, in order with what the caller's own one has before and after."""
    own = torch.cuda.current_stream(stream.device)
    stream.wait_stream(own)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        own.wait_stream(stream)


@functools.cache
def partition(device: torch.device) -> Parts:
    """Both parts of a GPU, as long as the process lives.

    Raises RuntimeError or AttributeError where the driver cannot.
    """
    torch.cuda.synchronize(device)  # the driver is up, and the device's own context there
    driver = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_int(device.index or 0)
    whole, first, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    _call(driver.cuDeviceGetDevResource, number, whole, _SM_RESOURCE)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    groups = ctypes.c_uint(1)
    _call(
        driver.cuDevSmResourceSplitByCount,
        first,
        ctypes.byref(groups),
        whole,
        rest,
        ctypes.c_uint(0),
        ctypes.c_uint(max(1, count // DECODE_FRACTION)),
    )
    return Parts(
        *(
            _stream(driver, number, device, resource, priority)
            for resource, priority in ((first, -1), (rest, 0))
        )
    )


def _stream(
    driver: ctypes.CDLL, number: ctypes.c_int, device: torch.device, resource: Any, priority: int
) -> Any:
    """On a green context of its own."""
    descriptor, context, stream = (ctypes.c_void_p() for _ in range(3))
    _call(driver.cuDevResourceGenerateDesc, ctypes.byref(descriptor), resource, ctypes.c_uint(1))
    _call(driver.cuGreenCtxCreate, ctypes.byref(context), descriptor, number, _DEFAULT_STREAM)
    _call(
        driver.cuGreenCtxStreamCreate,
        ctypes.byref(stream),
        context,
        _NON_BLOCKING,
        ctypes.c_int(priority),
    )
    return torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call, unused-ignore]


def _call(function: Any, *arguments: Any) -> None:
    error = function(*arguments)
    if error:
        raise RuntimeError(f"{function.__name__}: CUDA error {error}")
