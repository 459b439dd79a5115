"""What a lane sends to host memory and takes from it, without a wait in the middle of a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.gpu_weights.host_read import from_host
from moechat.prefill.gpu.exchange import host_buffer, mark


class HostCopy:
    """One tensor's copy, begun."""

    def __init__(self, there: torch.Tensor, done: Any) -> None:
        self._there, self._done = there, done

    def wait(self) -> NDArray[Any]:
        """The values, valid until the name is copied again; bfloat16 as its bits in uint16."""
        if self._done is not None:
            self._done.synchronize()
        if self._there.dtype == torch.bfloat16:
            bits: NDArray[Any] = self._there.view(torch.int16).numpy()
            return bits.view(np.uint16)
        array: NDArray[Any] = self._there.numpy()
        return array


class HostCopies:
    """Page-locked memory of one lane, by name: one copy of a name at a time."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def start(self, name: str, tensor: torch.Tensor) -> HostCopy:
        """Copy it in order of the current stream. Off CUDA it is where it has to be."""
        if tensor.device.type != "cuda":
            return HostCopy(tensor.contiguous(), None)
        size = tensor.numel() * tensor.element_size()
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = host_buffer(max(size, 16))
        there = self._memory[name][:size].view(tensor.dtype).view(tensor.shape)
        there.copy_(tensor, non_blocking=True)
        return HostCopy(there, mark(tensor.device))


class HostReads:
    """Page-locked memory of one lane that its device reads, by name: one read of a name at a time.

    By kernels: a copy would wait until the weights' copies pause (host_read).
    """

    def __init__(self) -> None:
        self._memory: dict[str, tuple[torch.Tensor, Any]] = {}

    def start(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``tensor``, of host memory, on the device, in order of the current stream."""
        if device.type != "cuda" or not tensor.numel():
            return tensor.to(device)
        size = tensor.numel() * tensor.element_size()
        memory, done = self._memory.get(name, (None, None))
        if done is not None:
            done.synchronize()  # of the layer before: long ago
        if memory is None or len(memory) < size:
            memory = host_buffer(size)
        here = memory[:size].view(tensor.dtype).view(tensor.shape)
        here.copy_(tensor)
        there = torch.empty_like(here, device=device)
        from_host(there, here)
        self._memory[name] = memory, mark(device)
        return there
