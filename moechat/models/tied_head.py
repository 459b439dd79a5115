"""A head that is stored although config.json ties it to the embedding."""

from __future__ import annotations

import numpy as np

from moechat.errors import CheckpointDamaged
from moechat.models.decoder_tensors import EMBEDDING_NAME, HEAD_MODULE
from moechat.models.quantized_parts import StoredParts
from moechat.models.spec import TensorView

# Rows that are compared. Two embeddings that were trained apart differ in every row, so a few tell;
# comparing all would read the two largest matrices of the model at every start. Small ones have no
# more rows than this. A head that differs elsewhere is ignored, as the public loaders do.
_COMPARED_ROWS = 64


def take_stored_head(parts: StoredParts) -> None:
    """Mark a stored head as used if it repeats the embedding; of another shape it stays left over.

    Raises CheckpointDamaged when it is another matrix, which the model would then not use.
    """
    name = HEAD_MODULE + ".weight"
    head, embedding = parts.look(name), parts.look(EMBEDDING_NAME)
    if head is None or embedding is None or head.shape != embedding.shape:
        return
    if head.dtype != embedding.dtype or not _same_rows(head, embedding):
        raise CheckpointDamaged(
            f"{head.file} does not fit config.json",
            f"{name!a} is not the embedding, and config.json ties the two",
            "Set tie_word_embeddings to false in config.json if the model has a head of its own",
        )
    parts.find(name)


def _same_rows(head: TensorView, embedding: TensorView) -> bool:
    """Bytes, not values: NaN equals itself."""
    rows, first, second = head.shape[0], head.array, embedding.array
    indices = np.unique(np.linspace(0, rows - 1, min(rows, _COMPARED_ROWS)).astype(int))
    return all(first[index].tobytes() == second[index].tobytes() for index in indices)
