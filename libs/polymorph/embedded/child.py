"""One supervised process: start, readiness, restart with backoff, drain."""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polymorph.bus.errors import Retryable
from polymorph.embedded.phases import phase

State = Literal["waiting", "starting", "ready", "restarting", "draining", "stopped"]

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0  # a process that ran this long starts its backoff anew
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

Ready = Callable[[], Awaitable[bool]]


def die_with_parent() -> None:
    """In the child, before exec: a supervisor that is killed leaves no process behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class ChildSpec:
    """How to run one process."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    ready: Ready
    where: str = ""
    drain_s: float = 15.0
    drain_rank: int = 0  # lower stops first; equal ranks stop together
    usual_start_s: float = 60.0  # a start that takes longer is told as such
    in_flight: Callable[[], Awaitable[int | None]] | None = None  # requests that a drain waits for
    after_ready: Callable[[], Awaitable[None]] | None = None


@dataclass
class Child:
    """A running process and what became of it."""

    spec: ChildSpec
    changed: Callable[["Child"], None]
    state: State = "waiting"
    pid: int | None = None
    restarts: int = 0
    since: float = field(default_factory=time.monotonic)
    detail: str = ""
    _process: asyncio.subprocess.Process | None = None
    _log_from: int = 0  # where this life of the process begins in its log
    _task: asyncio.Task[None] | None = None
    _failed: Exception | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"child-{self.spec.name}")

    async def wait_ready(self) -> None:
        """Returns at the first readiness, however long that takes; the caller may bound it.

        Raises:
            Exception: what follows readiness failed in a way that trying again does not mend.
        """
        await self._ready.wait()
        if self._failed is not None:
            raise self._failed

    def start_told(self) -> str:
        """How the start goes: the phase it is in, and what to expect of it."""
        waited, usual = time.monotonic() - self.since, self.spec.usual_start_s
        now = phase(self.spec.log, self._log_from)
        if waited > usual:
            expected = f"longer than usual: see {self.spec.log}"
        else:
            expected = f"up to {usual / 60:.0f} min where the model is compiled anew" if usual > 60 else ""
        return ", ".join(text for text in (now, expected) if text)

    def _become(self, state: State, detail: str = "") -> None:
        if state != self.state:
            self.since = time.monotonic()
        self.state, self.detail = state, detail
        self.changed(self)

    async def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._become("starting" if not self.restarts else "restarting")
            begun = time.monotonic()
            ending = await self._live()
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - begun > _STEADY_S else failures + 1
            delay = _backoff_s(failures)
            self.restarts += 1
            self._become("restarting", f"{ending}; again in {delay:g} s; log {self.spec.log}")
            await asyncio.sleep(delay)

    async def _live(self) -> str:
        """One life of the process, and how it ended."""
        try:
            process = await self._spawn()
        except (
            OSError,
            subprocess.SubprocessError,
        ) as error:  # a full disk or process table may have room later
            return f"could not be started: {error}"
        watch = asyncio.create_task(self._watch_readiness())
        code = await process.wait()
        watch.cancel()
        self._kill_group()
        return f"ended with {_describe(code)}"

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.spec.log.open("ab") as log:
            self._log_from = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.spec.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._process, self.pid = process, process.pid
        self.changed(self)
        return process

    async def _watch_readiness(self) -> None:
        failures = 0
        while True:
            try:
                await self._get_ready()
                break
            except Exception as error:  # noqa: BLE001 - nobody awaits this task, so whatever ends it is told here
                if not self._ready.is_set() and not isinstance(error, Retryable):
                    self._failed = error
                    self._ready.set()
                    return
                # A system that served once goes on whatever it was.
                failures += 1
                delay = _backoff_s(failures)
                self._become(self.state, f"{error or type(error).__name__}; again in {delay:g} s")
                await asyncio.sleep(delay)
        self._ready.set()
        self._become("ready")

    async def _get_ready(self) -> None:
        while not await self.spec.ready():  # noqa: ASYNC110 - another process gets ready, not an event of ours
            await asyncio.sleep(_POLL_S)
        if self.spec.after_ready is not None:
            await self.spec.after_ready()

    async def stop(self) -> None:
        """SIGTERM, then after the drain time SIGKILL to the whole process group."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            self._become("draining")
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self.spec.drain_s)
            except TimeoutError:
                self._kill_group()
                await process.wait()
        self._kill_group()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._become("stopped")

    def stop_now(self) -> None:
        """SIGKILL to the whole process group; `stop`, running or to come, then finds nothing left to wait for."""
        self._stopping.set()
        self._kill_group()

    def _kill_group(self) -> None:
        """Ends what a dead process left behind, such as an engine below a worker."""
        if self.pid is None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return


def _backoff_s(failures: int) -> float:
    return _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
