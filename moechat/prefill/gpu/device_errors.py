"""What torch and the driver raise, under the names that users meet."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat import _native
from moechat.errors import DeviceUnavailable, DoesNotFit


@contextlib.contextmanager
def named_errors(full: str, next_step: str) -> Iterator[None]:
    """DoesNotFit, saying ``full`` and ``next_step``, for full memory; DeviceUnavailable else."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The traceback would keep the tensors of its frames until nobody has the error any more,
        # and the next prompt may need their memory in other pieces.
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        raise DoesNotFit(full, _first_line(error), next_step) from error
    except RuntimeError as error:  # whatever the driver and its libraries report
        traceback.clear_frames(error.__traceback__)
        raise _failed(_first_line(error)) from error
    except _native.NativeError as error:
        name, why = error.args
        if name != "device-copy-failed":
            raise
        raise _failed(why) from error


def _failed(why: str) -> DeviceUnavailable:
    return DeviceUnavailable("the GPU failed", why, "--device cpu works without it")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
