"""What the demo runs: embedded mode, as a user starts it, and plain vLLM beside it under the same launch."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from polymorph.embedded.child import die_with_parent
from polymorph.embedded.folder import DataFolder, free_port
from polymorph.embedded.probe import http_status
from polymorph.engine.launch import EngineLaunch

READY_S = 900.0
# A demonstration shows in minutes what a fleet takes an hour for: fewer candidates, less rest between plans.
BUDGET = {
    "POLYMORPH_COMPILER_CANDIDATES_PER_SEARCH": "6",
    "POLYMORPH_COMPILER_SEARCH_SECONDS": "60",
    "POLYMORPH_COMPILER_SEARCHES_PER_DRIFT": "2",
    "POLYMORPH_COMPILER_COOLDOWN_S": "10",
    "POLYMORPH_COMPILER_DRIFT_WINDOWS": "2",
    "POLYMORPH_COMPILER_MIN_REQUESTS": "8",
}
_STOP_S = 150.0
_MARK = ".demonstration"


class NotReady(Exception):
    """A part of the demo ended, or took too long, before it was ready."""


class Process:
    """A process of the demo, with its output in a file or handed line by line to `say`."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, say: Callable[[str], None] | None = None) -> None:
        log = self.log.open("wb")
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if say else log,
            stderr=asyncio.subprocess.STDOUT if say else log,
            env=self._environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if say and self._process.stdout:
            self._reader = asyncio.create_task(_relay(self._process.stdout, say))

    def ended(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.returncode if self._process else None

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)


async def _relay(stream: asyncio.StreamReader, say: Callable[[str], None]) -> None:
    async for line in stream:
        say("  " + line.decode(errors="replace").rstrip())


def clear(data: Path) -> None:
    """Makes an empty data folder, of an earlier demonstration's or anew.

    Raises:
        ValueError: it holds something that no demonstration wrote.
    """
    if data.exists() and any(data.iterdir()) and not (data / _MARK).exists():
        raise ValueError(f"{data} is not a demonstration's folder and is left alone: give --data a new one")
    if data.exists():
        shutil.rmtree(data)
    data.mkdir(parents=True)
    (data / _MARK).touch()


def embedded(data: Path, model: Path, served: str, port: int) -> Process:
    """`polymorph up` on a data folder that is empty, in the mode that promotes by itself."""
    command = [sys.executable, "-m", "polymorph.embedded.cli", "up", "--mode", "canary", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", served, "--data", str(data)]
    return Process("polymorph up", command, {**BUDGET, **os.environ}, data / "up.log")


def plain_vllm(launch: EngineLaunch, port: int, log: Path) -> Process:
    """Plain vLLM's own server: the same model, threads, OpenMP runtime and limits, without our extension."""
    arguments = launch.plain_arguments()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    ours = {key: value for key, value in launch.environment().items() if not key.startswith("POLYMORPH_")}
    return Process("plain vLLM", command, {**os.environ, **ours}, log)


async def wait_ready(process: Process, port: int, path: str, say: Callable[[str], None]) -> None:
    """Waits for a 200; raises `NotReady` with the end of the log where the process dies or time runs out."""
    for waited in range(int(READY_S)):
        if await http_status(port, path) == 200:
            return
        if process.ended() is not None:
            tail = process.log.read_text(errors="replace")[-2000:] if process.log.exists() else "see above"
            raise NotReady(
                f"{process.name} ended with exit code {process.ended()} before it was ready:\n{tail}"
            )
        if waited and waited % 30 == 0:
            say(
                f"{process.name}: not ready after {waited} s (a first start compiles the model; up to {READY_S:.0f} s)"
            )
        await asyncio.sleep(1)
    raise NotReady(f"{process.name} was not ready after {READY_S:.0f} s; see {process.log}")


@asynccontextmanager
async def stopped_at_the_end(*processes: Process) -> AsyncIterator[None]:
    """Leaves no process behind, whatever happens."""
    try:
        yield
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


@contextmanager
def held(data: Path, *names: str) -> Iterator[None]:
    """These services of the supervisor stand still meanwhile, with all their processes: what is measured is serving
    alone, and the revision that is measured stays what it is.
    """
    children = instance(data)["children"]
    roots = [psutil.Process(children[name]["pid"]) for name in names]
    family = [each for root in roots for each in (root, *root.children(recursive=True))]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def instance(data: Path) -> dict[str, Any]:
    """What the supervisor wrote about itself."""
    state = DataFolder(data).read_state()
    if state is None:
        raise RuntimeError(f"no supervisor runs on {data}")
    return state


__all__ = [
    "NotReady",
    "Process",
    "clear",
    "embedded",
    "free_port",
    "held",
    "instance",
    "plain_vllm",
    "stopped_at_the_end",
    "wait_ready",
]
