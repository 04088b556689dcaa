"""Connections to workers: kept while warm, no limit on how many."""

import asyncio
import ssl
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit
from weakref import WeakSet

from polymorph.gateway.adapters.connection import ConnectFailed, Connection, Head, UpstreamError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a worker's url leads."""

    host: str
    port: int
    tls: bool
    prefix: str
    authority: bytes


@lru_cache(maxsize=4096)
def origin(url: str) -> Origin:
    """Reads a worker's url.

    Raises:
        ValueError: no http or https url with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no url of a worker: use http://host:port")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Origin(
        parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"), parts.netloc.encode()
    )


class Upstreams:
    """Hands out connections, freshest first, and closes those that stay idle for `idle_s`."""

    def __init__(self, *, idle_s: float, connect_timeout_s: float) -> None:
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: defaultdict[Origin, dict[Connection, asyncio.TimerHandle]] = defaultdict(dict)
        self._open: defaultdict[Origin, WeakSet[Connection]] = defaultdict(WeakSet)

    async def take(self, where: Origin) -> Connection:
        """A warm connection, else a new one.

        Raises:
            ConnectFailed: there is none to be had.
        """
        idle = self._idle[where]
        while idle:
            connection, timer = idle.popitem()
            timer.cancel()
            if not connection.closed:
                return connection
        return await self.connect(where)

    async def connect(self, where: Origin) -> Connection:
        """A new connection."""
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if where.tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(Connection, where.host, where.port, ssl=context)
        except TimeoutError as error:
            message = f"no connection to {where.host}:{where.port} within {self._connect_timeout_s:g} s"
            raise ConnectFailed(message, refused=False) from error
        except OSError as error:
            # Only the host itself refuses; "no route" and "unknown name" say that nobody answers.
            refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailed(f"{where.host}:{where.port}: {error}", refused=refused) from error
        self._open[where].add(connection)
        return connection

    def give_back(self, where: Origin, connection: Connection) -> None:
        """Keeps a connection whose exchange is over; closes one that cannot be used again."""
        if not connection.reusable:
            connection.abort()
            return
        timer = asyncio.get_running_loop().call_later(self._idle_s, self._expire, where, connection)
        self._idle[where][connection] = timer

    def give_up(self, where: Origin, silent_s: float) -> None:
        """Aborts the exchanges that heard nothing for `silent_s`: a frozen worker never ends them by itself."""
        for connection in list(self._open[where]):
            if connection.silent_for(silent_s):
                connection.abort("the worker is dead: it answers neither its probes nor this request")

    async def get(self, url: str, path: str, timeout_s: float) -> tuple[Head, bytes]:
        """A small GET, for probes: head and body.

        Raises:
            UpstreamError: no answer within `timeout_s`.
        """
        where = origin(url)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.connect(where)
                request = f"GET {where.prefix}{path} HTTP/1.1\r\nhost: {where.authority.decode()}\r\n\r\n"
                connection.send(request.encode(), b"")
                head = await connection.head()
                body = b""
                while (chunk := await connection.chunk()) is not None:
                    body += chunk
        except TimeoutError as error:
            raise UpstreamError(f"{url}{path} did not answer within {timeout_s:g} s") from error
        finally:
            if connection is not None:
                connection.abort()
        return head, body

    def close(self) -> None:
        for idle in self._idle.values():
            for connection, timer in idle.items():
                timer.cancel()
                connection.abort()
        self._idle.clear()

    def _expire(self, where: Origin, connection: Connection) -> None:
        self._idle[where].pop(connection, None)
        connection.abort()
