"""What a measurement must say of where it was made: processor, memory, limits, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from moechat import __version__, _native


def machine_facts() -> dict[str, Any]:
    """Processor, memory and operating system, for a report; what is not known is None."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "usable_cpus": _native.available_cpus(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory_bytes("MemTotal"),
        "instruction_sets": _native.supported_instruction_sets(),
        "load_average_1_minute": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of moechat and of what its measurements stand on."""
    from numpy import __version__ as numpy_version

    return {
        "moechat": __version__,
        "python": platform.python_version(),
        "numpy": numpy_version,
    }


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor, as the system tells it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(path).strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdecimal():
            sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes, default=None)


def memory_bytes(name: str) -> int | None:
    """A row of /proc/meminfo ("MemTotal", "MemAvailable"); None when it is not there."""
    text = _first_value(Path("/proc/meminfo"), name)
    number = (text or "").split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdecimal() else None


def available_memory_bytes() -> int | None:
    """What may still be used: free memory, less when a control group allows less."""
    available = memory_bytes("MemAvailable")
    limits = [limit for limit in (available, _cgroup_room_bytes()) if limit is not None]
    return min(limits, default=None)


def _cgroup_room_bytes() -> int | None:
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
    return min(rooms, default=None)


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
