"""A persistent warm engine of the evaluator's own, started in the background and asked from the evaluating thread."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from polymorph.engine.launch import EngineLaunch
from polymorph.sandbox import wire

_log = logging.getLogger(__name__)
_NICE = 10
_ANSWER_S = 180.0
_MODULE = "polymorph.evaluator.adapters.engine_child"


class EngineGone(RuntimeError):
    """The engine did not start, or ended; it is started anew for the next evaluation."""


class EngineLane:
    """One engine process; at most one question at a time."""

    def __init__(self, launch: EngineLaunch, folder: Path, start_s: float) -> None:
        self.launch = launch
        self._folder, self._start_s = folder, start_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._warm = False

    @property
    def warm(self) -> bool:
        """Whether it answers at once."""
        return self._warm

    def start(self) -> None:
        """Starts where it does not run, and waits until it is warm.

        Raises:
            EngineGone: it did not come up in time.
        """
        with self._lock:
            if self._warm and self._process is not None and self._process.poll() is None:
                return
            self._stop()
            self._spawn()
            try:
                self._receive(self._start_s)
            except EngineGone:
                self._stop()
                raise
            self._warm = True
            _log.info("the evaluator's engine is warm")

    def stop(self) -> None:
        self._stop()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Raises `EngineGone` where it ended, RuntimeError where it refused."""
        if self._sock is None:
            raise EngineGone("the engine is not started")
        try:
            wire.send(self._sock, {"do": do, **fields})
            answer = self._receive(_ANSWER_S)
        except (EngineGone, wire.Closed) as error:
            self._stop()
            raise EngineGone(f"the engine ended while it was asked to {do}") from error
        if not answer.get("ok"):
            raise RuntimeError(str(answer.get("reason")))
        return answer

    def rpc(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self.ask("rpc", method=method, arguments=list(arguments), named=named)["result"]

    def waited(self) -> tuple[float, float]:
        """Seconds that the engine's threads ran, and waited for a processor, since they started."""
        if self._process is None:
            return 0.0, 0.0
        ran = waited = 0
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                first, second = path.read_text().split()[:2]
                ran, waited = ran + int(first), waited + int(second)
        return ran / 1e9, waited / 1e9

    def _spawn(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        arguments = {**self.launch.arguments(), "async_scheduling": False, "disable_log_stats": True}
        environment = {**os.environ, **self.launch.in_process_environment(), "VLLM_CONFIGURE_LOGGING": "1"}
        with (self._folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", str(_NICE), sys.executable, "-m", _MODULE, str(theirs.fileno()), json.dumps(arguments)],
                pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        theirs.close()
        self._sock = ours
        _log.info("the evaluator's engine starts (process %d)", self._process.pid)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        sock = self._sock
        if sock is None:
            raise EngineGone("the engine was stopped")
        sock.settimeout(timeout_s)
        try:
            return wire.receive(sock)[0]
        except (wire.Closed, TimeoutError, wire.BadMessage, OSError) as error:
            log = self._folder / "engine.log"
            raise EngineGone(f"the engine did not answer within {timeout_s:.0f} s; see {log.name}") from error

    def _stop(self) -> None:
        self._warm = False
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process = None
