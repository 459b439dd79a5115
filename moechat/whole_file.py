"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[BufferedIOBase]:
    """A file to write that takes the place of ``path`` when nothing was raised.

    Only its owner may read it. Several processes may do this at once; the last one stays.
    ``durable``: it is on the disk before an older one goes. Raises OSError, also for a folder that
    is not there.
    """
    handle, temporary = tempfile.mkstemp(prefix=".moechat-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
