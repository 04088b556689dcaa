"""The object store, in the layout of NATS's own object stores: chunks under a nuid, and a description that names it."""

import asyncio
import base64
import hashlib
import json
import re
from dataclasses import dataclass

from polymorph.bus import topology
from polymorph.bus.errors import Corrupt, NotFound, TooLarge
from polymorph.bus.nats.connection import Connection, told_as_bus_errors
from polymorph.bus.nats.stored import last_stored, read_batch

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNKS_AT_ONCE = 32
_PUT_S = 15.0
"""A put is many writes, each synced; beside it the time for its size."""
_BYTES_PER_S = 1_000_000


class Objects:
    """Bytes by their sha256."""

    def __init__(self, connection: Connection, store: str = topology.ARTIFACTS) -> None:
        self._connection = connection
        self._store = store
        self._stream = topology.object_stream(store)

    async def put(self, data: bytes) -> str:
        """Keeps `data`; what is there already, and whole, is left alone."""
        digest = hashlib.sha256(data).hexdigest()
        if await self._is_whole(digest):
            return digest
        limit = _PUT_S + len(data) / _BYTES_PER_S
        with told_as_bus_errors(f"put object {digest}"):
            async with asyncio.timeout(limit):
                store = await self._connection.jetstream.object_store(self._store)
                await store.put(digest, data)
        return digest

    async def get(self, digest: str, *, at_most: int | None = None) -> bytes:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest!r} is no object's name: a sha256 in 64 lower-case hex digits")
        name = base64.urlsafe_b64encode(digest.encode()).decode()
        described = await last_stored(self._connection, self._stream, f"$O.{self._store}.M.{name}")
        if described is None:
            raise NotFound(f"no object {digest}")
        description = json.loads(described.data)
        if description.get("deleted"):
            raise NotFound(f"no object {digest}")
        limit = _Limit(digest, at_most)
        limit.check(int(description.get("size", 0)))
        subject = f"$O.{self._store}.C.{description['nuid']}"
        data = await self._chunks(subject, int(description.get("chunks", 0)), limit)
        if hashlib.sha256(data).hexdigest() != digest:
            raise Corrupt(f"object {digest}: its {len(data)} bytes have another digest")
        return data

    async def _is_whole(self, digest: str) -> bool:
        try:
            await self.get(digest)
        except (NotFound, Corrupt):
            return False
        return True

    async def _chunks(self, subject: str, count: int, limit: "_Limit") -> bytes:
        parts: list[bytes] = []
        first = 1
        while len(parts) < count:
            batch = await read_batch(
                self._connection,
                self._stream,
                subject,
                first=first,
                count=min(_CHUNKS_AT_ONCE, count - len(parts)),
            )
            if not batch:
                break
            parts.extend(stored.data for stored in batch)
            limit.check(sum(map(len, parts)))  # a description may tell less than there is
            first = batch[-1].sequence + 1
        return b"".join(parts)


@dataclass(frozen=True)
class _Limit:
    digest: str
    at_most: int | None

    def check(self, size: int) -> None:
        if self.at_most is not None and size > self.at_most:
            raise TooLarge(f"object {self.digest} has {size} bytes, {self.at_most} are taken")
