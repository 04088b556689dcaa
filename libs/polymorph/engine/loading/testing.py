"""Runs the engine's self-test of a kernel in a process that reaches nothing but what it tests."""

import asyncio
import json
import os
import sys

from polymorph.config.folders import cache_folder
from polymorph.engine.loading.admission import Refused
from polymorph.engine.selftest_case import MOST_BYTES, SelfTest, SelfTestResult
from polymorph.kernels.host.pool import HostUnavailable, host_library
from polymorph.kernels.toolchain import NoCompiler, detect_toolchain, run_command
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation

_TIMEOUT_S = 240.0
_MODULE = "polymorph.engine.selftest"


async def host() -> str:
    """The library that kernels are called through, compiled once a toolchain.

    Raises:
        Refused: it cannot be compiled here.
    """
    try:
        toolchain = await asyncio.to_thread(detect_toolchain)
        return str(await asyncio.to_thread(host_library, cache_folder(), toolchain, run_command))
    except (NoCompiler, HostUnavailable) as error:
        raise Refused(f"no kernel is tested here: {error}") from error


async def check(test: SelfTest) -> None:
    """Returns where the kernel computes what the native code does.

    Raises:
        Refused: it does not, it crashed, or it takes too long.
    """
    # -P: a folder that the process may write is no place to import from.
    command = (*isolation.prefix(Isolation(test.level)), sys.executable, "-P", "-m", _MODULE)
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(test.library,),
        cwd=test.scratch,
        env=_environment(test.scratch),
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, complaints = await _answer(child, json.dumps(test.document()).encode())
    except TimeoutError as error:
        raise Refused(f"the self-test of {test.definition} took over {_TIMEOUT_S:.0f} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    _judge(test, child.returncode, out, complaints)


def _environment(scratch: str) -> dict[str, str]:
    """Nothing of ours but where the interpreter finds its code."""
    passed_on = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return {
        "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch, "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **passed_on,
    }  # fmt: skip


async def _answer(child: asyncio.subprocess.Process, question: bytes) -> tuple[bytes, bytes]:
    """What the process says on both channels, no more of either than `MOST_BYTES`; it has ended then."""
    if child.stdin is None or child.stdout is None or child.stderr is None:
        raise RuntimeError("the self-test was started without its pipes")
    child.stdin.write(question)
    child.stdin.close()
    out, complaints = await asyncio.gather(_capped(child.stdout), _capped(child.stderr))
    await child.wait()
    return out, complaints


async def _capped(stream: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream, which is read to its end so that nobody waits for a full pipe."""
    kept = b""
    while part := await stream.read(MOST_BYTES):
        kept = (kept + part)[-MOST_BYTES:]
    return kept


def _judge(test: SelfTest, status: int | None, out: bytes, complaints: bytes) -> None:
    if status != 0:
        last = complaints.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise Refused(f"the self-test of {test.definition} ended with {status}: {last[0][:200]}")
    try:
        answer = SelfTestResult(**json.loads(out.splitlines()[-1]))
    except (IndexError, ValueError, TypeError) as error:
        raise Refused(f"the self-test of {test.definition} gave no verdict: {out[-200:]!r}") from error
    if answer.ok is not True:
        raise Refused(f"self-test: {str(answer.reason)[:500]}")
