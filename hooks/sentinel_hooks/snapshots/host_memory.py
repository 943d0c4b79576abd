"""Free host memory: what this process may still take, in bytes.

    available_bytes()      None where nothing can be read (then nobody should guess)

The smaller of the kernel's MemAvailable and what is left of the container's limit (cgroup 2 or 1):
in a container MemAvailable alone speaks of the whole machine.
"""

from __future__ import annotations

from pathlib import Path

_CGROUP = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that may still be allocated; None if unknown."""
    found: list[int] = []
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit_name, used_name in _CGROUP:
        try:
            limit = int((root / limit_name).read_text(encoding="ascii"))
            used = int((root / used_name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # absent, or "max"
        found.append(max(limit - used, 0))
    return min(found) if found else None
