"""What a report must say of where it was made."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from moechat import __version__, _native
from moechat.bench.synthetic_folder import free_ram_bytes


def machine_facts() -> dict[str, Any]:
    """Processor, memory, operating system and versions; what is not known is None."""
    return {
        "machine": {
            "cpu": _cpu_name(),
            "usable_cpus": _native.available_cpus(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "free_memory_bytes": free_ram_bytes(),
            "load_average_1_minute": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {
            "moechat": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def _cpu_name() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return None
