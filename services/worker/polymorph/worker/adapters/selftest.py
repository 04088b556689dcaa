"""Runs the engine's self-test of a kernel in a process of its own."""

import asyncio
import json
import os
import sys
from dataclasses import asdict

from polymorph.engine.selftest_case import SelfTest
from polymorph.worker.domain.admission import Refused

_TIMEOUT_S = 240.0
_PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "POLYMORPH_CACHE", "CXX", "PYTHONPATH")


async def check(test: SelfTest) -> None:
    """Returns where the kernel computes what the native code does.

    Raises:
        Refused: it does not, it crashed, or it takes too long.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "polymorph.engine.selftest",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, complaints = await child.communicate(json.dumps(asdict(test)).encode())
    except TimeoutError as error:
        raise Refused(f"the self-test of {test.definition} took over {_TIMEOUT_S:.0f} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    _judge(test, child.returncode, out, complaints)


def _judge(test: SelfTest, status: int | None, out: bytes, complaints: bytes) -> None:
    if status != 0:
        last = complaints.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise Refused(f"the self-test of {test.definition} ended with {status}: {last[0][:200]}")
    answer = json.loads(out.splitlines()[-1])
    if not answer["ok"]:
        raise Refused(f"self-test: {answer['reason']}")
