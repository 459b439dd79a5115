"""Whether a model bears INT4 KV: what the probe found, kept by model and engine.

The probe itself runs a model and is moechat.eval.probe.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moechat
from moechat.errors import Usage
from moechat.folders import cache_folder
from moechat.json_file import parse_json_object
from moechat.kv.ladder import LOSS, TIERS
from moechat.kv.packet import VERSION
from moechat.kv.policy import NUM_SINKS, WINDOW
from moechat.kv.tiers import BITS, ROTARY_OF_INT4
from moechat.whole_file import whole_file

CAUTIOUS_TIERS = 2  # of a model that was not probed, or did not pass
_MOST_TRIALS, _MOST_BYTES = 100, 10_000
# Another protocol of the probe, or another coding: what was found before says nothing any more.
_PLAN = (LOSS, TIERS, NUM_SINKS, WINDOW)
_ENGINE = ("probe 1", moechat.__version__, VERSION, BITS, ROTARY_OF_INT4, _PLAN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the probe found.

    ``num_tiers``: that a spectrum policy may have, 2 without INT4. ``trials``, ``native_trials``:
    which needles were found at the harshest setting, and with native KV. ``kl_nats``: divergence of
    the logits from those of native KV, the mean of ``kl_tokens`` tokens. ``date``: ISO 8601.
    """

    num_tiers: int
    trials: tuple[bool, ...]
    native_trials: tuple[bool, ...]
    kl_nats: float
    kl_tokens: int
    date: str

    @property
    def conclusive(self) -> bool:
        """False: a needle was missed, and with native KV one was missed as well."""
        return all(self.trials) or all(self.native_trials)

    @property
    def text(self) -> str:
        """One line for people."""
        allowed = "no INT4" if self.num_tiers == CAUTIOUS_TIERS else "INT4 allowed"
        proof = "" if self.conclusive else ", which proves nothing"
        return (
            f"{allowed} ({self.num_tiers} tiers): needles {sum(self.trials)} of "
            f"{len(self.trials)}, with native KV {sum(self.native_trials)}{proof}; KL "
            f"{self.kl_nats:.2g} nats a token over {self.kl_tokens:,} tokens; {self.date}"
        )

    def keys(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def fingerprint(files: str) -> str:
    """What a verdict is stored under: of the model's files, by their fingerprint, and the engine.

    Another one of either has another name.
    """
    return hashlib.blake2b((repr(_ENGINE) + files).encode(), digest_size=16).hexdigest()


def load_verdict(name: str) -> Verdict | None:
    """What was stored for a fingerprint; None when there is nothing, or it is damaged."""
    try:
        return _checked(_read(name))
    except (OSError, ValueError, Usage):
        return None


def verdict_damage(name: str) -> str:
    """Why what was stored for a fingerprint cannot be used; "" when it can, or nothing was."""
    try:
        return "" if _checked(_read(name)) else f"{str(_path(name))!a} is damaged"
    except ValueError:
        return f"{str(_path(name))!a} is damaged"
    except (FileNotFoundError, NotADirectoryError, Usage):  # Usage: no home
        return ""
    except OSError as error:
        return f"{str(_path(name))!a}: {error.strerror or error}"


def _read(name: str) -> dict[str, Any]:
    with _path(name).open("rb") as file:
        return parse_json_object(file.read(_MOST_BYTES))


def store_verdict(name: str, verdict: Verdict) -> str:
    """Keep it, whole or not at all; why that could not be done, or ""."""
    try:
        path = _path(name)
    except Usage as error:  # no home
        return f"{error.what}, {error.why}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(json.dumps(verdict.keys()).encode())
    except OSError as error:  # a full disk, a folder of somebody else
        return f"{str(path.parent)!a}: {error.strerror or error}"
    return ""


def _path(name: str) -> Path:
    return cache_folder() / f"kv-probe-{name}.json"


def _checked(content: dict[str, Any]) -> Verdict | None:
    try:
        found = Verdict(**content)
    except TypeError:
        return None
    trials, native_trials = found.trials, found.native_trials
    if not (_are_flags(trials) and _are_flags(native_trials)):
        return None
    kl_nats, kl_tokens = found.kl_nats, found.kl_tokens
    good = (
        (type(found.num_tiers) is int and found.num_tiers in TIERS)
        and (found.num_tiers == CAUTIOUS_TIERS or all(trials))
        and (type(kl_nats) in (int, float) and 0 <= kl_nats <= sys.float_info.max)
        and (type(kl_tokens) is int and kl_tokens >= 0)
        and (isinstance(found.date, str) and found.date.isascii() and found.date.isprintable())
    )
    if not good:
        return None
    return Verdict(
        found.num_tiers, tuple(trials), tuple(native_trials), float(kl_nats), kl_tokens, found.date
    )


def _are_flags(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MOST_TRIALS
        and all(type(item) is bool for item in value)
    )
