"""`python -m polymorph.engine.selftest`: one kernel against the native computation on captured inputs.

Runs in a process of its own before the kernel comes near an engine: a crash here is a refusal there. This process opens
the interpreter, the captured inputs and its scratch folder alone, and computes the verdict; the kernel runs in another
one, which opens nothing at all (`selftest_runner`). Reads a `SelfTest` in JSON on standard input, writes a
`SelfTestResult`.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from polymorph.engine.selftest_case import MOST_BYTES, SelfTest
from polymorph.sandbox import landlock, limits
from polymorph.sandbox.isolation import Isolation

CPU_LIMIT_S = 120
_FILE_BYTES = 1 << 20
_PROCESSES = 1024  # beyond those of the user, whose engines start threads meanwhile
# The dynamic loader, the interpreter and the C library; libraries look at the processors and at themselves.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self", "/proc/cpuinfo", "/proc/meminfo",
    "/sys/devices/system", "/dev/urandom",
)  # fmt: skip


def main() -> int:
    test = SelfTest.of(json.loads(sys.stdin.read(MOST_BYTES)))
    os.nice(10)  # the engine next to us serves users
    processes = limits.processes_now() + _PROCESSES
    limits.apply(cpu_s=CPU_LIMIT_S, file_bytes=_FILE_BYTES, processes=processes)
    if test.level >= Isolation.FILTERED:
        landlock.restrict(_doors(test))
    from polymorph.engine.selftest_judge import judge  # noqa: PLC0415 - torch is loaded behind the first door

    sys.stdout.write(json.dumps(asdict(judge(test))) + "\n")
    return 0


def _doors(test: SelfTest) -> Iterable[tuple[Path, int]]:
    code = (*sys.path, sys.prefix, sys.base_prefix, *_SYSTEM, test.host)
    yield from ((Path(path), landlock.RUN) for path in code if path)
    yield from ((Path(path), landlock.READ) for path in (*test.calls, test.weight) if path)
    yield from ((Path(path), landlock.EVERYTHING) for path in (test.scratch, os.devnull))


if __name__ == "__main__":
    sys.exit(main())
