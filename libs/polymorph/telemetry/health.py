"""A small HTTP server for /healthz, /readyz and /metrics, for services that serve no HTTP themselves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 5.0


class HealthServer:
    """Says whether the process lives (/healthz) and whether it can do its work (/readyz)."""

    def __init__(
        self,
        port: int,
        ready: Callable[[], Awaitable[bool]],
        *,
        host: str = "127.0.0.1",
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._port = port
        self._host = host
        self._ready = ready
        self._registry = registry
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens; a port of 0 in the settings means that nobody asked for it, so nothing is opened."""
        if self._port:
            self._server = await asyncio.start_server(self._serve, self._host, self._port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, path: str) -> tuple[int, str, bytes]:
        if path == "/healthz":
            return 200, "text/plain", b"alive\n"
        if path == "/readyz":
            ready = await self._ready()
            return (200, "text/plain", b"ready\n") if ready else (503, "text/plain", b"not ready\n")
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", generate_latest(self._registry)
        return 404, "text/plain", b"try /healthz, /readyz or /metrics\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                line = await reader.readline()
                parts = line.decode("latin-1").split()
                status, kind, body = await self._answer(parts[1] if len(parts) > 1 else "")
            head = f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        except (TimeoutError, ConnectionError):
            _log.debug("a health probe went away")
        finally:
            writer.close()
