"""Resource limits of a process that runs untrusted code."""

import contextlib
import os
import resource

_GIB = 1 << 30


def apply(
    *,
    cpu_s: int,
    memory: int | None = None,
    files: int = 256,
    file_bytes: int = 0,
    processes: int | None = None,
) -> None:
    """Limits this process: processor seconds, address space, open files, the size of any file it writes, and how many
    processes and threads its user may have.
    """
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, processes),
    ):
        if value is None:
            continue
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def processes_now() -> int:
    """Processes and threads of this user: what a limit on them counts from."""
    found = 0
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116
                    found += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
    return found


def address_space_now() -> int:
    """Bytes of address space that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        return int(statm.read().split()[0]) * resource.getpagesize()


def grown(extra_gib: float) -> int:
    """A limit on address space that leaves `extra_gib` beyond what is mapped now."""
    return address_space_now() + int(extra_gib * _GIB)
