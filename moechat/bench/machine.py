"""What a measurement must say of where it was made: processor, memory, limits, versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moechat import __version__, _native


def machine_facts() -> dict[str, Any]:
    """``machine`` and ``versions`` of a report; what is not known is None."""
    return {
        "machine": {
            "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
            "usable_cpus": _native.available_cpus(),
            "last_level_cache_bytes": last_level_cache_bytes(),
            "memory_bytes": _memory_bytes(),
            "available_memory_bytes": available_memory_bytes(),
            "instruction_sets": _native.supported_instruction_sets(),
            "load_average_1_minute": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {
            "moechat": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def thread_notes(threads: Iterable[int]) -> list[str]:
    """What to say when there are more threads than processors to run them."""
    most, usable = max(threads), _native.available_cpus()
    if most <= usable:
        return []
    plural = "s" if usable != 1 else ""
    return [f"{most} threads share {usable} usable processor{plural}: they wait for each other"]


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor, as the system tells it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(path).strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdecimal():
            sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes, default=None)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """What may still be used: free memory and file pages, or less where a control group says so."""
    number = (_first_value(Path("/proc/meminfo"), "MemAvailable") or "").split()[:1]
    limits = [_memory_bytes(), *_cgroup_rooms_bytes()]
    if number and number[0].isdecimal():
        limits.append(int(number[0]) * 1024)
    return max(min(limits), 0)


def _cgroup_rooms_bytes() -> list[int]:
    """Limit less use of this process's memory group and those above it (versions 1 and 2).

    Cached file pages count as used there but give way, so they are taken as free.
    """
    rooms = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        else:
            continue
        group = root / path.lstrip("/")
        while group != root.parent:
            limit, used = (_read(group / name).strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal():
                rooms.append(int(limit) - int(used) + _cached_bytes(group, names[2]))
            group = group.parent
    return rooms


def _cached_bytes(group: Path, name: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _first_value(path: Path, key: str) -> str | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
