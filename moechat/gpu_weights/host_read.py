"""Host memory read by a kernel, where a copy would wait for the weights' stream.

While copies of weights follow one another on a GPU's copy engine, it serves nobody else: a copy of
28 KB took from 0.1 s to for ever on an H200, the same bytes read by a kernel 0.1 ms.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.kernels import has_kernels


def from_host(out: torch.Tensor, source: torch.Tensor) -> None:
    """``source``, page-locked, to ``out`` on the current stream; both contiguous, of one size.

    Off CUDA an ordinary copy. ``source`` must stay as it is until the stream is past it.
    """
    if out.nbytes != source.nbytes or not (out.is_contiguous() and source.is_contiguous()):
        raise ValueError("the two are not the same bytes")
    if not out.numel():
        return
    if not has_kernels(out.device.type):
        out.copy_(source, non_blocking=True)
        return
    from moechat.gpu_weights import triton_host_read

    triton_host_read.read(out, source)
