"""GGUF files as read-only mappings: every tensor is a view of its file's own bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged
from moechat.weights.gguf_header import Header, read_header
from moechat.weights.gguf_types import BY_NAME, PLAIN_DTYPES
from moechat.weights.mapped import map_files
from moechat.weights.safetensors_header import quoted


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """A tensor in its file; ``dtype`` is GGUF's name for it ("F32", "Q4_K"), shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    file_content: NDArray[np.uint8]
    begin_byte: int

    @property
    def array(self) -> NDArray[Any]:
        """Read-only view of the mapping, made on demand and without a copy.

        Blocks: uint8 [..., bytes of a row]. Others [*shape]: float32 for F32, uint16 for BF16 and
        F16, numpy's equal for the rest. It keeps the mapping alive.
        """
        shape, plain = self.shape, PLAIN_DTYPES.get(self.dtype)
        if plain is None:
            _, block_elements, block_bytes = BY_NAME[self.dtype]
            shape = (*shape[:-1], shape[-1] // block_elements * block_bytes)
        view: NDArray[Any] = np.ndarray(
            shape, plain or np.uint8, self.file_content, offset=self.begin_byte
        )
        return view


class GGUFCheckpoint:
    """One model's GGUF file, or the parts of a split one, mapped MAP_SHARED and PROT_READ.

    ``metadata``: int, float, bool, str, numpy array or StringArray by key.
    """

    def __init__(
        self,
        files: list[Path],
        metadata: dict[str, Any],
        tensors: dict[str, GGUFTensor],
        total_bytes: int,
    ) -> None:
        self.files, self.metadata, self.tensors = files, metadata, tensors
        self.total_bytes = total_bytes

    @classmethod
    def open(cls, files: Sequence[Path]) -> GGUFCheckpoint:
        """Map the files (all parts of one model, in order) and check their headers.

        Weights are not read. Raises CheckpointDamaged for anything wrong with them.
        """
        metadata: dict[str, Any] = {}
        tensors: dict[str, GGUFTensor] = {}
        total_bytes = 0
        for number, (path, content) in enumerate(map_files(files)):
            header = read_header(path, content)
            _check_part(path, header, number, len(files))
            if number == 0:  # the other parts repeat nothing but split.*
                metadata = header.metadata
            for name, dtype, shape, begin_byte, end_byte in header.tensors:
                if name in tensors:
                    raise CheckpointDamaged(
                        f"{path} is damaged",
                        f"tensor {quoted(name)} is also in {tensors[name].file.name}",
                        "Download both files again",
                    )
                tensors[name] = GGUFTensor(name, dtype, shape, path, content, begin_byte)
                total_bytes += end_byte - begin_byte
        promised = metadata.get("split.tensors.count", len(tensors))
        if type(promised) is not int or promised != len(tensors):
            raise CheckpointDamaged(
                f"{files[0]} and its other parts do not fit together",
                f"they hold {len(tensors)} tensors of {ascii(promised)[:40]}",
                "Download all parts again",
            )
        return cls(list(files), metadata, tensors, total_bytes)

    def close(self) -> None:
        """Let go of the mappings; each is unmapped when the last array on it is gone."""
        self.tensors, self.metadata = {}, {}


def _check_part(path: Path, header: Header, number: int, num_files: int) -> None:
    """CheckpointDamaged unless the file says that it is part ``number`` of ``num_files``."""
    stated = header.metadata.get("split.count", 0)
    if type(stated) is not int or max(stated, 1) != num_files:
        raise CheckpointDamaged(
            f"{path} does not stand alone" if num_files == 1 else f"{path} is of another model",
            f"it says it is one of {ascii(stated)[:40]} parts, and there are {num_files}",
            "Give all parts the names they were made with (…-00001-of-0000N.gguf)",
        )
    stated = header.metadata.get("split.no", 0)
    if type(stated) is not int or (num_files > 1 and stated != number):
        raise CheckpointDamaged(
            f"{path} has the name of another part",
            f"it is named as part {number + 1} and says it is part {ascii(stated)[:40]} (from 0)",
        )
