"""Memory of this host: what an engine's processes hold, and what a second one could have."""

from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_KIB = 1024


def held_by(pids: Iterable[int], proc: Path = _PROC) -> int:
    """Bytes that these processes and all below them hold, pages that are shared counted by their share."""
    return sum(_proportional(proc / str(pid)) for pid in with_children(set(pids), proc))


def available(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without swapping, within the limit of this container."""
    free = _field(proc / "meminfo", "MemAvailable:")
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text()
        reclaimable = _field(cgroup / "memory.stat", "inactive_file", scale=1)
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - int(used) + reclaimable))


def with_children(pids: set[int], proc: Path = _PROC) -> set[int]:
    """These processes and all below them."""
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        found.add(pid)
        for children in (proc / str(pid) / "task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # that thread has ended meanwhile
    return found


def _proportional(process: Path) -> int:
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            return _field(process / name, field)
        except OSError:
            continue
    return 0


def _field(path: Path, name: str, scale: int = _KIB) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * scale
    return 0
