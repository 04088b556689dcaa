"""How far apart untrusted code is kept from the machine: what this host gives, and what the configuration demands."""

import functools
import shutil
import subprocess
from enum import IntEnum

from polymorph.sandbox import landlock, seccomp

UNSHARE = (
    "unshare", "--user", "--net", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip


class Isolation(IntEnum):
    """Levels, each holding those below it."""

    PROCESS = 0  # resource limits and an empty environment only
    FILTERED = 1  # and Landlock, and a filter of system calls
    NAMESPACED = 2  # and user, network, process, IPC and host name spaces of its own


class IsolationTooWeak(RuntimeError):
    """This host isolates less than the configuration demands: no untrusted code runs here."""


@functools.cache
def detect() -> Isolation:
    """What this host gives."""
    if landlock.version() == 0 or not seccomp.available():
        return Isolation.PROCESS
    return Isolation.NAMESPACED if _unshares() else Isolation.FILTERED


def require(minimum: Isolation) -> Isolation:
    """The level of this host.

    Raises:
        IsolationTooWeak: it is below `minimum`.
    """
    found = detect()
    if found < minimum:
        raise IsolationTooWeak(
            f"isolation here is {found.name.lower()}, at least {minimum.name.lower()} is demanded: allow user "
            f"namespaces, Landlock and seccomp, or lower min_isolation"
        )
    return found


def level_named(name: str) -> Isolation:
    """The level that a setting names.

    Raises:
        ValueError: there is no such level.
    """
    if name.upper() not in Isolation.__members__:
        levels = ", ".join(level.name.lower() for level in Isolation)
        raise ValueError(f"min_isolation is {name!r}: one of {levels}")
    return Isolation[name.upper()]


def describe(level: Isolation) -> str:
    """The level in words, for events."""
    if level is Isolation.PROCESS:
        return "process: rlimits"
    filters = f"landlock-{landlock.version()}, seccomp, rlimits"
    return f"filtered: {filters}" if level is Isolation.FILTERED else f"namespaced: {filters}"


def prefix(level: Isolation) -> tuple[str, ...]:
    """What stands before a command that is to run in namespaces of its own."""
    return UNSHARE if level is Isolation.NAMESPACED else ()


def _unshares() -> bool:
    if shutil.which(UNSHARE[0]) is None:
        return False
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False, timeout=10)
    return done.returncode == 0
