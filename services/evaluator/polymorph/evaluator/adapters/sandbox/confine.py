"""Runs one command that reads the toolchain and writes one folder: `python -m ...confine FOLDER COMMAND...`.

Standard library only: it starts in a few milliseconds and is itself what is confined.
"""

import os
import sys
from pathlib import Path

from polymorph.sandbox import landlock, limits

_READABLE = tuple(
    Path(path) for path in ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
)
_CPU_S = 60
_MEMORY = 4 << 30
_FILE_BYTES = 64 << 20
_PROCESSES = 256  # beyond those of the user; a compiler needs five


def main() -> None:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    os.chdir(folder)
    processes = limits.processes_now() + _PROCESSES
    limits.apply(cpu_s=_CPU_S, memory=_MEMORY, file_bytes=_FILE_BYTES, processes=processes)
    if landlock.version():
        readable = [(path, landlock.RUN) for path in _READABLE]
        rules = [*readable, (Path("/dev/null"), landlock.EVERYTHING), (folder, landlock.EVERYTHING)]
        landlock.restrict(rules)
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder), "LC_ALL": "C"}
    os.execve(command[0], command, environment)  # noqa: S606


if __name__ == "__main__":
    main()
