"""Tells models apart by samples of their files, without reading all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from moechat.errors import CheckpointDamaged

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def files_fingerprint(files: Sequence[Path]) -> str:
    """Of sizes and samples, in the order of the names; the names themselves do not count.

    Models of the same recipe have equal names, sizes and headers, hence the samples: 64 of 4 KB
    spread over the files, first and last bytes of each among them. Raises CheckpointDamaged when a
    file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    samples = max(2, _SAMPLES // max(1, len(files)))
    for path in sorted(files, key=lambda path: path.name):
        try:
            with open(path, "rb") as file:
                file_bytes = os.fstat(file.fileno()).st_size
                digest.update(file_bytes.to_bytes(8, "little"))
                for i in range(samples):
                    file.seek(max(0, file_bytes - _SAMPLE_BYTES) * i // (samples - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            why = error.strerror or str(error)
            raise CheckpointDamaged(f"{path} cannot be read", why) from None
    return digest.hexdigest()
