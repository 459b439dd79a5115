"""moechat: local chat with intact Mixture-of-Experts models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from moechat.engine.engine import Engine
    from moechat.sample.params import SamplingParams


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: ``moechat --help`` needs none of them."""
    if name == "Engine":
        from moechat.engine.engine import Engine

        return Engine
    if name == "SamplingParams":
        from moechat.sample.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'moechat' has no attribute '{name}'")
