"""A gateway and routers as real processes, and doubles of workers, each on ports of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[2] / "doubles"))

from openai_upstream import OpenAIUpstream

from polymorph.bus.server import NatsServer

START_S = 30.0


def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class ServiceProcess:
    """One service under test."""

    def __init__(self, service: str, log: Path, settings: dict[str, Any], probe: str) -> None:
        self.service = service
        self.probe = probe
        self._log = log
        prefix = f"POLYMORPH_{service.upper()}_"
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
        self._environment = {**os.environ, **{prefix + key.upper(): text for key, text in texts.items()}}
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, *, until: int = 200) -> "ServiceProcess":
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"polymorph.{self.service}"],
                env=self._environment,
                stdout=output,
                stderr=output,
                cwd=self._log.parent,
            )
        await wait_for_status(self.probe, until, self)
        return self

    def log(self) -> str:
        return self._log.read_text()

    async def signal(self, signum: int) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        process = self.process
        if process is None:
            raise RuntimeError(f"{self.service} was not started")
        process.send_signal(signum)
        return await asyncio.to_thread(process.wait, 20)

    async def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            await self.signal(signal.SIGKILL)


async def wait_for_status(url: str, status: int, service: ServiceProcess | None = None) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
        while True:
            if service is not None and service.process is not None and service.process.poll() is not None:
                raise RuntimeError(f"{service.service} ended at once:\n{service.log()}")
            try:
                if (await client.get(url)).status_code == status:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


class Services:
    """Starts services for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[ServiceProcess] = []

    def gateway(self, nats: NatsServer | None = None, **settings: Any) -> tuple[ServiceProcess, str]:
        """A gateway that is not started yet, and its url."""
        port = settings.setdefault("port", free_port())
        settings.setdefault("data_dir", str(self._folder / "gateway-data"))
        settings.setdefault("drain_timeout_s", 5)
        url = f"http://127.0.0.1:{port}"
        return self._make("gateway", nats, settings, f"{url}/healthz"), url

    def router(self, nats: NatsServer, **settings: Any) -> ServiceProcess:
        port = settings.setdefault("health_port", free_port())
        settings.setdefault("window_s", 0.5)
        return self._make("router", nats, settings, f"http://127.0.0.1:{port}/readyz")

    async def ready_gateway(self, nats: NatsServer | None = None, **settings: Any) -> str:
        """The url of a started gateway that has a worker."""
        gateway, url = self.gateway(nats, **settings)
        await gateway.start()
        await wait_for_status(f"{url}/readyz", 200, gateway)
        return url

    def _make(
        self, service: str, nats: NatsServer | None, settings: dict[str, Any], probe: str
    ) -> ServiceProcess:
        if nats is None:
            settings["nats"] = {"url": f"nats://127.0.0.1:{free_port()}"}
        else:
            reach = nats.settings(service)
            password = reach.password.get_secret_value() if reach.password else None
            settings["nats"] = {**reach.model_dump(mode="json", exclude_none=True), "password": password}
        made = ServiceProcess(service, self._folder / f"{service}-{len(self._all)}.log", settings, probe)
        self._all.append(made)
        return made

    async def stop(self) -> None:
        for service in self._all:
            await service.stop()


@pytest_asyncio.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    started = Services(tmp_path)
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[OpenAIUpstream]:
    async with OpenAIUpstream() as double:
        yield double


@pytest_asyncio.fixture
async def second() -> AsyncIterator[OpenAIUpstream]:
    async with OpenAIUpstream(name="second") as double:
        yield double


@pytest.fixture
def chat() -> bytes:
    """A request whose bytes are peculiar on purpose: order, spaces, escapes and an unknown field must survive."""
    return (
        b'{ "stream":true,"messages":[{"role":"user","content":"h\\u00e9llo \xe2\x9c\x93"}],'
        b'"vendor_x": {"b":1,"a":[1.50]}, "model":"m"}'
    )
