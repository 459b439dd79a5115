"""The vendor's sampling defaults, from a model folder's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moechat.errors import BadParameter, CheckpointDamaged
from moechat.json_file import read_json_object
from moechat.sample.params import SamplingParams

_LIMIT_BYTES = 1 << 20  # more is no generation_config.json
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# What else changes which tokens come, with the values of transformers that change nothing.
_NOT_IMPLEMENTED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0,
    "dola_layers": None,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1,
}


def vendor_defaults(folder: Path) -> dict[str, Any]:
    """Sampling parameters that the file sets; empty when there is no file.

    Raises CheckpointDamaged when they cannot be used.
    """
    path, config = _read(folder)
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        why = f"do_sample is {ascii(do_sample)[:80]}, allowed are true and false"
        raise CheckpointDamaged(f"{path} cannot be used", why)
    if do_sample is False:
        return {"temperature": 0.0}
    defaults = {key: config[key] for key in _KEYS if config.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except BadParameter as error:
        raise CheckpointDamaged(f"{path} cannot be used", error.what) from None
    return defaults


def ignored_settings(folder: Path) -> list[str]:
    """Keys of the file that change which tokens come and that moechat has no equal for.

    Raises CheckpointDamaged when the file cannot be read.
    """
    _, config = _read(folder)
    return [
        key
        for key, neutral in _NOT_IMPLEMENTED.items()
        if config.get(key) not in (None, neutral, [], {})
    ]


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "generation_config.json"
    return path, read_json_object(path, _LIMIT_BYTES) if path.exists() else {}
