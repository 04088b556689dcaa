"""Routers on a bus, and a Valkey of a test's own, which can be killed, frozen and started again empty."""

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.embedded.servers import valkey_binary
from polymorph.router.app import Router
from polymorph.router.settings import RouterSettings

Routing = Callable[..., contextlib.AbstractAsyncContextManager[Router]]


@contextlib.asynccontextmanager
async def _routing(bus: Bus, **settings: Any) -> AsyncIterator[Router]:
    stop = asyncio.Event()
    router = Router(RouterSettings(**settings), bus, SystemClock())
    task = asyncio.create_task(router.run(stop))
    async with asyncio.timeout(10):
        while not await router.ready():
            await asyncio.sleep(0.02)
    try:
        yield router
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


@pytest.fixture
def routing() -> Routing:
    """`async with routing(bus, window_s=0.5) as router`: a router that answers, ended afterwards."""
    return _routing


class ValkeyServer:
    """One server on loopback that keeps nothing on disk, as embedded mode starts it."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        self.url = f"redis://127.0.0.1:{port}/0"
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder))
        log = self._folder / "valkey.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(valkey_binary()), "--port", str(self._port), *options], stdout=output, stderr=output
            )
        until = time.monotonic() + 15
        while b"Ready to accept connections" not in log.read_bytes().rpartition(b"is starting")[2]:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"valkey-server is not ready:\n{log.read_text()}")
            time.sleep(0.02)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def _signal(self, signum: int) -> None:
        if self._process is None:
            raise RuntimeError("valkey-server does not run")
        self._process.send_signal(signum)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """Not started yet."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    server = ValkeyServer(tmp_path / "valkey", port)
    yield server
    server.kill()
