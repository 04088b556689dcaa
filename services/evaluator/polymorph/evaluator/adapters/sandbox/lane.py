"""The evaluator's handle on its sandbox: a zygote, and one candidate's process at a time."""

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polymorph.kernels.host.pool import SCRATCH_BYTES
from polymorph.sandbox import isolation, wire
from polymorph.sandbox.isolation import Isolation

_log = logging.getLogger(__name__)
_START_S = 120.0
_REAP_S = 0.2


class SandboxBroken(RuntimeError):
    """The sandbox itself does not work: no verdict about a candidate follows from it."""


class CandidateDied(RuntimeError):
    """The candidate's process ended, or did not answer, while its code ran."""


class CandidateRefused(RuntimeError):
    """The candidate did not take what it was given."""


class Forged(RuntimeError):
    """An answer came that our own code in the process did not send."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What candidates' processes are started with."""

    harness: Path
    isa: str
    isa_tier: int
    cpus: tuple[int, ...]
    level: Isolation
    openmp: Path | None


@dataclass(frozen=True, slots=True)
class Used:
    """How a candidate's process ended and the processor seconds it took."""

    signal: str
    code: int
    killed: bool
    cpu_s: float


class Process:
    """A candidate's process as the evaluator drives it."""

    def __init__(self, sock: socket.socket, lane: "Lane") -> None:
        self._sock = sock
        self._lane = lane
        self.used: Used | None = None

    def ask(
        self, do: str, *, fds: tuple[int, ...] = (), timeout_s: float = 30.0, **fields: Any
    ) -> dict[str, Any]:
        """Sends an order, waits for its answer; `fds` are closed here.

        Raises:
            CandidateDied, CandidateRefused, Forged.
        """
        nonce = secrets.token_hex(8)
        try:
            self._sock.settimeout(timeout_s)
            wire.send(self._sock, {"do": do, "nonce": nonce, **fields}, fds)
            answer, unexpected = wire.receive(self._sock)
        except TimeoutError as error:
            used = self.end(wait_s=0)
            raise CandidateDied(f"did not return within {timeout_s:.0f} s and was ended") from error
        except wire.Closed as error:
            used = self.end(wait_s=_REAP_S)
            raise CandidateDied(_how(used)) from error
        except wire.BadMessage as error:
            raise Forged(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)
        if unexpected or answer.get("nonce") != nonce:
            raise Forged("an answer came that does not belong to the question")
        if not answer.get("ok"):
            raise CandidateRefused(str(answer.get("reason", "no reason"))[:500])
        return answer

    def waited(self) -> tuple[float, float]:
        """Seconds that the process's threads ran, and waited for a processor, since they started."""
        load = self._lane.control({"do": "load"})
        return load["ran_ns"] / 1e9, load["waited_ns"] / 1e9

    def end(self, *, wait_s: float = 1.0) -> Used:
        """Closes the channel, ends the process where it does not end itself, and tells what it used. Idempotent."""
        if self.used is None:
            self._sock.close()
            answer = self._lane.control({"do": "reap", "wait_s": wait_s})
            self.used = Used(str(answer["signal"]), answer["code"], answer["killed"], answer["cpu_s"])
        return self.used


class Lane:
    """Starts a zygote and hands out processes, one at a time."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cpu_s = 0.0
        self.native_problem = ""
        self._sock: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._wanted = False

    @property
    def ready(self) -> bool:
        """Whether a zygote answered last; one that died is found out, and started anew, by the next process."""
        return self._sock is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Raises `SandboxBroken` where the zygote does not come up."""
        self._wanted = True
        ours, theirs = socket.socketpair()
        module = "polymorph.evaluator.adapters.sandbox.zygote"
        command = [
            *isolation.prefix(self.machine.level), sys.executable, "-m", module,
            str(theirs.fileno()), str(self.machine.harness), self.machine.isa,
        ]  # fmt: skip
        self._zygote = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=self._environment(), cwd="/"
        )
        theirs.close()
        ours.settimeout(_START_S)
        try:
            ready, _ = wire.receive(ours)
        except (wire.Closed, TimeoutError, wire.BadMessage) as error:
            ours.close()
            self._end()
            raise SandboxBroken("the sandbox did not start; its log tells why") from error
        self._sock, self.native_problem = ours, str(ready["native"])

    def stop(self) -> None:
        self._wanted = False
        self._end()

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._zygote is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._zygote.wait(2)
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None

    def control(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        """Asks the zygote. Raises `SandboxBroken` where it does not answer."""
        if self._sock is None:
            raise SandboxBroken("the sandbox is not started")
        try:
            wire.send(self._sock, message, fds)
            return wire.receive(self._sock)[0]
        except (wire.Closed, TimeoutError, wire.BadMessage) as error:
            self._end()  # a late answer would be taken for that of the next question
            raise SandboxBroken("the sandbox's zygote does not answer") from error

    @contextlib.contextmanager
    def process(
        self,
        arms: dict[str, list[int]],
        *,
        native: str = "",
        dtype: str = "float32",
        cpu_s: int = 120,
        memory_gib: float = 4.0,
    ) -> Iterator[Process]:
        """A fresh process with each arm's libraries loaded (descriptors, one for each load) and the doors locked."""
        ours, theirs = socket.socketpair()
        try:
            self._spawn(theirs.fileno())
        except SandboxBroken:
            ours.close()
            raise
        finally:
            theirs.close()
        process = Process(ours, self)
        try:
            process.ask(
                "setup",
                fds=tuple(fd for fds in arms.values() for fd in fds),
                arms={name: len(fds) for name, fds in arms.items()},
                native=native, dtype=dtype, cpu_s=cpu_s, memory_gib=memory_gib, cpus=list(self.machine.cpus),
                isa=self.machine.isa_tier, scratch_bytes=SCRATCH_BYTES,
                confined=self.machine.level >= Isolation.FILTERED,
            )  # fmt: skip
            yield process
        finally:
            used = process.end()
            self.cpu_s += used.cpu_s

    def _spawn(self, descriptor: int) -> None:
        """Asks for a process; a zygote that is dead is started anew, once, unless the lane was stopped."""
        try:
            self.control({"do": "spawn"}, (descriptor,))
        except SandboxBroken as error:
            if not self._wanted:
                raise
            _log.warning("%s: it is started anew", error)
            self.start()
            self.control({"do": "spawn"}, (descriptor,))

    def _environment(self) -> dict[str, str]:
        """Nothing of ours but what the numerical libraries need; a candidate finds the same everywhere."""
        threads = str(len(self.machine.cpus))
        environment = {
            "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C", "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        if self.machine.openmp is not None:
            # vLLM's threads spin for a millisecond between regions. Here a spinning thread takes the core of whoever
            # sends the next batch, and every second batch takes twice its time; both arms sleep instead.
            runtime = {"KMP_BLOCKTIME": "0", "KMP_TPAUSE": "0"}
            environment.update(runtime, LD_PRELOAD=str(self.machine.openmp))
        return environment


def _how(used: Used) -> str:
    if used.signal == "SIGSYS":
        return "made a system call, which a kernel never does"
    if used.signal in ("SIGSEGV", "SIGBUS"):
        return f"touched memory that is not its own ({used.signal})"
    if used.signal == "SIGXCPU":
        return "used more processor time than any kernel needs"
    if used.signal:
        return f"ended the process by {used.signal}"
    return f"ended the process (exit code {used.code})"
