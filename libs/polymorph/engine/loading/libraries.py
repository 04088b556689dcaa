"""Kernels in memory, each under a path that can hold nothing else: what was checked is what an engine loads.

A file on disk may be another one by the time that it is opened again. So the bytes that were checked are sealed in a
memory file, and engines, which are processes of this one's user, open it through this process's descriptor. A loader
returns what it loaded before under the same path, so a descriptor's number is never used for a second library.
"""

import errno
import fcntl
import os
import resource
from collections import OrderedDict
from dataclasses import dataclass

from polymorph.engine.loading.admission import Refused
from polymorph.sandbox.sealed import sealed

_HIGHEST = 1 << 16
_KEPT = 256
"""As many stay in memory; what is asked for again after that is sealed anew, under another path."""


@dataclass(frozen=True)
class HeldLibrary:
    """A library as engines of this worker load it."""

    path: str
    descriptor: int


class Libraries:
    """Holds libraries by their digest, for as long as this process lives and not beyond."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._held: OrderedDict[str, HeldLibrary] = OrderedDict()
        self._next = _most_descriptors() // 2  # above what sockets and files get

    def hold(self, digest: str, content: bytes) -> HeldLibrary:
        """The library of that digest; `content` has it.

        Raises:
            Refused: this process has no number left for another one.
        """
        if digest not in self._held:
            self._held[digest] = self._sealed(digest, content)
            while len(self._held) > self._kept:
                os.close(self._held.popitem(last=False)[1].descriptor)
        self._held.move_to_end(digest)
        return self._held[digest]

    def held(self, digest: str) -> HeldLibrary | None:
        """The library of that digest, where it is held."""
        if digest in self._held:
            self._held.move_to_end(digest)
        return self._held.get(digest)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1].descriptor)

    def _sealed(self, digest: str, content: bytes) -> HeldLibrary:
        try:
            number = self._numbered(sealed(digest, content))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EMFILE, errno.ENFILE):
                raise
            raise Refused(
                f"this worker has held libraries under every descriptor up to {self._next}: restart it"
            ) from error
        self._next = number + 1
        return HeldLibrary(f"/proc/{os.getpid()}/fd/{number}", number)

    def _numbered(self, fd: int) -> int:
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, self._next)
        finally:
            os.close(fd)


def _most_descriptors() -> int:
    """Raises the soft limit as far as it goes, and tells it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
