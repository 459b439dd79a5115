"""How much memory a process may still take: the system's, the nodes', the control group's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What new memory may take without swapping; None when the system does not say.

    MemAvailable of /proc/meminfo, and what the control group (version 2) leaves below its limit.
    Pages of files that nobody changed count as free.
    """
    system = _kilobytes(root / "proc/meminfo").get("MemAvailable")
    known = [bytes_ for bytes_ in (system, _control_group_bytes(root)) if bytes_ is not None]
    return min(known, default=None)


def free_node_bytes(nodes: Sequence[int], root: Path = Path("/")) -> list[int | None]:
    """The same for NUMA nodes, by their numbers: free pages and those of files."""
    result: list[int | None] = []
    for node in nodes:
        fields = _kilobytes(root / f"sys/devices/system/node/node{node}/meminfo")
        parts = [fields.get(name) for name in ("MemFree", "Active(file)", "Inactive(file)")]
        result.append(None if None in parts else sum(part or 0 for part in parts))
    return result


def _kilobytes(path: Path) -> dict[str, int]:
    """Fields of a meminfo file in bytes."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    lines = re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(value) * 1024 for name, value in lines}


def _control_group_bytes(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup"
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        files = re.findall(
            r"^(?:in)?active_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE
        )
    except (OSError, ValueError):  # "max": no limit
        return None
    return max(0, limit - used + sum(map(int, files)))
