"""Every error a user can meet: what happened, why, what to do next, a stable name, an exit code."""

from __future__ import annotations

import errno
import os


class MoechatError(Exception):
    """Base of all moechat errors.

    ``what``, ``why`` and ``next_step`` are sentences without a final full stop; the last two may be
    empty. ``name`` is stable and may be matched by scripts.
    """

    name = "error"
    exit_code = 1

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        self.what, self.why, self.next_step = what, why, next_step
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The whole error as one line of text."""
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}. {self.next_step}." if self.next_step else f"{text}."


class Usage(MoechatError):
    """A flag, argument or input that cannot be used as given."""

    name, exit_code = "usage", 2


class InvalidUtf8(MoechatError):
    """Input text is not UTF-8."""

    name, exit_code = "invalid-utf8", 2


class PromptEmpty(MoechatError):
    """There is nothing to answer."""

    name, exit_code = "prompt-empty", 2


class BadParameter(MoechatError, ValueError):
    """A sampling or engine parameter is out of range."""

    name, exit_code = "bad-parameter", 2


class DeviceUnavailable(MoechatError):
    """A GPU was asked for and is not there, cannot be used, or failed."""

    name = "device-unavailable"


class ModelNotFound(MoechatError):
    """No registry entry and no folder of that name, or its weights are not here."""

    name, exit_code = "model-not-found", 3


class CheckpointDamaged(MoechatError):
    """A model file is missing, truncated or contradicts its own headers."""

    name, exit_code = "checkpoint-damaged", 3


class ArchitectureUnsupported(MoechatError):
    """config.json names an architecture or a setting that moechat does not implement."""

    name, exit_code = "architecture-unsupported", 3


class TextUnavailable(MoechatError):
    """The model folder lacks a tokenizer or a chat template."""

    name, exit_code = "text-unavailable", 3


class PromptTooLong(MoechatError):
    """The prompt does not fit the context."""

    name, exit_code = "prompt-too-long", 4


class DoesNotFit(MoechatError):
    """Memory, CPU or another resource of this machine does not suffice."""

    name, exit_code = "does-not-fit", 4


class NonFiniteLogits(MoechatError):
    """The model produced NaN or infinity; the message names the first bad layer."""

    name, exit_code = "non-finite-logits", 1


class PacketRefused(MoechatError):
    """A KV packet whose checksum or geometry is wrong."""

    name, exit_code = "packet-refused", 1


class KVNotEncodable(MoechatError):
    """A key or value that a KV encoding cannot hold: not finite, or too large for float16."""

    name, exit_code = "kv-not-encodable", 1


class EngineClosed(MoechatError):
    """The engine was closed while, or before, it was used."""

    name, exit_code = "engine-closed", 1


class SessionBusy(MoechatError):
    """The session is already working on a request."""

    name, exit_code = "session-busy", 1


def from_native(name: str, message: str) -> MoechatError:
    """The error class for a stable name that native code threw."""
    classes: dict[str, type[MoechatError]] = {
        "non-finite-logits": NonFiniteLogits,
        "bad-argument": BadParameter,
        "isa-unsupported": DoesNotFit,
        "does-not-fit": DoesNotFit,
    }
    return classes.get(name, MoechatError)(message)


def system_error_text(error: OSError) -> str:
    """What the system refused, for people: the file, if it is known, and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)!a}: {reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the output cannot be written: {reason}"
    return reason
