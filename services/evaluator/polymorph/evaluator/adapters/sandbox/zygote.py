"""The process that candidates' processes are forked from: torch and vLLM's operations are loaded once, in name spaces
of their own, and a candidate starts in milliseconds. It runs no candidate's code itself.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from typing import Any

from polymorph.evaluator.adapters.sandbox import native
from polymorph.evaluator.adapters.sandbox.child import Child
from polymorph.sandbox import wire


class Zygote:
    """Forks one candidate's process at a time and tells how it ended."""

    def __init__(self, sock: socket.socket, harness: ctypes.CDLL) -> None:
        self._sock = sock
        self._harness = harness
        self._pid = 0

    def serve(self) -> None:
        with contextlib.suppress(wire.Closed):
            while True:
                message, fds = wire.receive(self._sock)
                wire.send(self._sock, getattr(self, f"on_{message['do']}")(message, fds))

    def on_spawn(self, _: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        pid = os.fork()
        if pid == 0:
            self._become(fds[0])
        os.close(fds[0])
        self._pid = pid
        return {"pid": pid}

    def on_reap(self, message: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Waits up to `wait_s` for the process to end by itself, then ends it; tells how it went and what it used."""
        if not self._pid:
            return {"signal": 0, "code": 0, "cpu_s": 0.0, "killed": False}
        killed = not self._ended(message["wait_s"])
        if killed:
            os.kill(self._pid, signal.SIGKILL)
        _pid, status, usage = os.wait4(self._pid, 0)
        self._pid = 0
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        return {"signal": name, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime, "killed": killed}

    def on_load(self, message: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Nanoseconds that the process ran, and waited for a processor, over all its threads."""
        del message
        ran = waited = 0
        folder = f"/proc/{self._pid}/task"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(folder):  # noqa: PTH208
                with open(f"{folder}/{task}/schedstat", encoding="ascii") as file:  # noqa: PTH123
                    first, second = file.read().split()[:2]
                ran, waited = ran + int(first), waited + int(second)
        return {"ran_ns": ran, "waited_ns": waited}

    def _ended(self, wait_s: float) -> bool:
        descriptor = os.pidfd_open(self._pid)
        try:
            ready, _, _ = select.select([descriptor], [], [], wait_s)
        finally:
            os.close(descriptor)
        return bool(ready)

    def _become(self, fd: int) -> None:
        """The new process never returns into the zygote's loop."""
        code = 70
        try:
            self._sock.close()
            child = Child(
                socket.socket(fileno=fd), self._harness
            )  # held: closing it here is a system call too many
            child.serve()
            code = 0
        finally:
            os._exit(code)


def main() -> None:
    descriptor, harness_path, isa = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    harness = ctypes.CDLL(harness_path)
    harness.hx_context.restype = ctypes.c_void_p
    harness.hx_multiply_add.restype = ctypes.c_double
    harness.hx_read.restype = ctypes.c_double
    problem = ""
    try:
        native.load(isa)
    except (native.NoNative, OSError, RuntimeError) as error:
        problem = str(error)[:300]
    sock = socket.socket(fileno=descriptor)
    wire.send(sock, {"ready": True, "native": problem})
    Zygote(sock, harness).serve()


if __name__ == "__main__":
    main()
