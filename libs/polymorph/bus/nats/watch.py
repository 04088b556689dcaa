"""Watching a bucket: a list, then what the server repeats after keeping it, and lists again.

The repeats are core NATS and may be lost; so a reconnect lists at once, and every watch lists again in its rhythm.
Expiry by TTL sends nothing at all: only a list shows it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from nats.aio.msg import Msg

from polymorph.bus import topology
from polymorph.bus.errors import Unavailable
from polymorph.bus.nats.connection import RETRY_WAIT_S, Connection, told_as_bus_errors
from polymorph.bus.nats.keyvalue import Buckets
from polymorph.bus.port import KeyValue

log = logging.getLogger(__name__)

RELIST_S = 30.0


class Watch:
    """One watch on the keys of a bucket that match a pattern."""

    def __init__(self, connection: Connection, buckets: Buckets, bucket: str, pattern: str) -> None:
        self._connection = connection
        self._buckets = buckets
        self._bucket = bucket
        self._pattern = pattern
        self._prefix = f"{topology.KEPT_VALUES}.{bucket}."
        self._news: asyncio.Queue[KeyValue | None] = asyncio.Queue()
        self._seen: dict[str, KeyValue] = {}
        # What expires is told by lists alone, so such a bucket is listed more often.
        ttl = topology.BUCKET_TTL_S.get(bucket)
        self._relist_s = RELIST_S if ttl is None else min(RELIST_S, ttl / 4)

    async def values(self) -> AsyncIterator[KeyValue]:
        """Current values, then changes, until the consumer of the iterator ends it."""
        with told_as_bus_errors(f"watch {self._bucket}"):
            kept = await self._connection.client.subscribe(self._prefix + self._pattern, cb=self._on_kept)
        forget = self._connection.on_reconnect(lambda: self._news.put_nowait(None))
        loop = asyncio.get_running_loop()
        try:
            while True:
                for entry in await self._list():
                    yield entry
                relist_at = loop.time() + self._relist_s
                while (entry_or_none := await self._next(relist_at - loop.time())) is not None:
                    if self._is_news(entry_or_none):
                        yield entry_or_none
        finally:
            forget()
            if not self._connection.client.is_closed:
                await kept.unsubscribe()

    async def _on_kept(self, msg: Msg) -> None:
        headers = dict(msg.headers or {})
        revision = headers.get("Nats-Sequence")
        if revision is None:
            return
        value = None if "KV-Operation" in headers or "Nats-Marker-Reason" in headers else msg.data
        key = msg.subject.removeprefix(self._prefix)
        self._news.put_nowait(KeyValue(key=key, value=value, revision=int(revision)))

    async def _next(self, within_s: float) -> KeyValue | None:
        """The next change; None where it is time to list again."""
        try:
            async with asyncio.timeout(max(0.0, within_s)):
                return await self._news.get()
        except TimeoutError:
            return None

    def _is_news(self, entry: KeyValue) -> bool:
        seen = self._seen.get(entry.key)
        if seen is not None and seen.revision >= entry.revision:
            return False
        self._seen[entry.key] = entry
        return True

    async def _list(self) -> list[KeyValue]:
        """What changed since the last list, with keys that are gone as deletions."""
        listed = await self._until_listed()
        news: list[KeyValue] = []
        if self._seen and max(e.revision for e in self._seen.values()) > max(
            (e.revision for e in listed.values()), default=0
        ):
            return self._after_setback(listed)
        for entry in listed.values():
            known = entry.key in self._seen
            if self._is_news(entry) and (known or entry.value is not None):
                news.append(entry)
        news.extend(self._gone(listed))
        return news

    def _after_setback(self, listed: dict[str, KeyValue]) -> list[KeyValue]:
        """The highest revision we saw is gone: it expired, or the bucket was made anew and counts from 1 again.

        Told whole in both cases: a value may be told twice, never missed.
        """
        news = self._gone(listed)
        self._seen = dict(listed)
        return [*news, *(entry for entry in listed.values() if entry.value is not None)]

    def _gone(self, listed: dict[str, KeyValue]) -> list[KeyValue]:
        gone = [entry for key, entry in self._seen.items() if key not in listed]
        for entry in gone:
            del self._seen[entry.key]
        return [KeyValue(e.key, None, e.revision) for e in gone if e.value is not None]

    async def _until_listed(self) -> dict[str, KeyValue]:
        while True:
            self._connection.check()
            try:
                return await self._buckets.entries(self._bucket, self._pattern)
            except Unavailable as error:
                log.debug("watch %s: %s", self._bucket, error)
                await asyncio.sleep(RETRY_WAIT_S)
