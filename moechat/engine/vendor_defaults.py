"""The vendor's sampling defaults, from a model folder's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moechat.errors import BadParameter, CheckpointDamaged
from moechat.json_file import read_json_object
from moechat.sample.params import SamplingParams

_LIMIT_BYTES = 1 << 20  # more is no generation_config.json
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def vendor_defaults(folder: Path) -> dict[str, Any]:
    """Sampling parameters that the file sets; empty when there is no file.

    Raises CheckpointDamaged when they cannot be used.
    """
    path = folder / "generation_config.json"
    config = read_json_object(path, _LIMIT_BYTES) if path.exists() else {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {key: config[key] for key in _KEYS if config.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except BadParameter as error:
        raise CheckpointDamaged(f"{path} cannot be used", error.what) from None
    return defaults
