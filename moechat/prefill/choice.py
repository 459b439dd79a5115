"""On which device a prompt is read: the CPU, or a GPU that all weights cross to once a prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from moechat.prefill.span import PrefillDevice

# Until both devices were measured: a GPU's pass takes seconds for any number of tokens.
USUAL_THRESHOLD_TOKENS = 512
# Fewer tokens tell nothing of a device's rate.
LEAST_MEASURED_TOKENS = 16
_NEWEST_SHARE = 0.5  # of the newest measurement in what is known


@dataclass(frozen=True)
class Part:
    """So many of a prompt's tokens as one span of a device."""

    device: PrefillDevice
    num_tokens: int


class DeviceChoice:
    """Prompts of ``threshold_tokens`` or more go to the GPU; None: where they take less time.

    What both take is measured with every prompt: the CPU's time grows with the tokens, the GPU's is
    about that of the copies, or more where all prompts were long. Not with the GPU's first: files
    are page-locked meanwhile.
    """

    def __init__(
        self, cpu: PrefillDevice, gpu: PrefillDevice | None, threshold_tokens: int | None = None
    ) -> None:
        self.cpu, self.gpu = cpu, gpu
        self._given = threshold_tokens
        self._cpu_tokens_per_second = 0.0
        self._gpu_seconds: dict[int, float] = {}  # of a pass, by the tokens' number of bits
        self._copy_seconds = 0.0  # of a pass
        self._gpu_is_warm = False
        self._used: dict[str, None] = {}

    @property
    def names_used(self) -> str:
        """The devices that have read prompts to their end, first come first; "" for none."""
        return ", ".join(self._used)

    @property
    def threshold_tokens(self) -> int | None:
        """From how many new tokens on the GPU reads a prompt; None: there is none."""
        if self.gpu is None:
            return None
        if self._given is not None:
            return self._given
        if not self._cpu_tokens_per_second or not self._gpu_seconds:
            return USUAL_THRESHOLD_TOKENS
        size = min(self._gpu_seconds)
        threshold = int(self._cpu_tokens_per_second * self._gpu_seconds[size])
        if threshold.bit_length() < size and self._copy_seconds:
            # Shorter than any that was measured: computing is less than there, copies are as many.
            threshold = min(threshold, int(self._cpu_tokens_per_second * self._copy_seconds))
        return max(1, threshold)

    def plan(self, num_tokens: int) -> list[Part]:
        """How ``num_tokens`` new tokens are read, in order: as even parts if one does not fit."""
        threshold = self.threshold_tokens
        if self.gpu is None or threshold is None or num_tokens < threshold:
            return [Part(self.cpu, num_tokens)]
        most = self.gpu.max_tokens or num_tokens
        count = -(-num_tokens // most)
        ends = [num_tokens * number // count for number in range(count + 1)]
        return [Part(self.gpu, end - begin) for begin, end in itertools.pairwise(ends)]

    def measured(
        self, device: PrefillDevice, num_tokens: int, seconds: float, copy_seconds: float = 0.0
    ) -> None:
        """A span of so many tokens took so long; copies of weights, beside computing, so long."""
        self._used[device.name] = None
        if seconds <= 0:
            return
        if device is self.gpu:
            if not self._gpu_is_warm:
                self._gpu_is_warm = True
                return
            size = num_tokens.bit_length()
            self._gpu_seconds[size] = _mixed(self._gpu_seconds.get(size, 0.0), seconds)
            self._copy_seconds = _mixed(self._copy_seconds, copy_seconds)
        elif num_tokens >= LEAST_MEASURED_TOKENS:
            rate = num_tokens / seconds
            self._cpu_tokens_per_second = _mixed(self._cpu_tokens_per_second, rate)


def _mixed(known: float, newest: float) -> float:
    return known + _NEWEST_SHARE * (newest - known) if known else newest
