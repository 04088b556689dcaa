"""Which worker served a program last, shared between router replicas through Valkey.

Placement reads and writes the map in memory alone. Everything here happens behind it, and Valkey may vanish, hang or
come back empty at any moment.
"""

import asyncio
import logging
import math
import re
import uuid
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from polymorph.config.clock import Clock
from polymorph.router.adapters import metrics
from polymorph.router.domain.announcements import Announcements
from polymorph.router.domain.programs import Program, Programs

CHANNEL = "polymorph:programs"
PREFIX = "polymorph:programs:"
ANSWER_S = 2.0
"""Valkey that does not answer for so long is away."""

_WRITE_EVERY_S = 0.05
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0
_LOAD_S = 30.0
# So few at a time that handling them never keeps a placement waiting for long.
_BATCH = 100

_NAME = r"(?P<pool>[A-Za-z0-9_-]{1,128}):(?P<digest>[0-9a-f]{32})"
_WORKER = r"(?P<worker>[!-~]{1,256})"
_KEY = re.compile(PREFIX + _NAME)
_KEPT = re.compile(_WORKER)
_HEARD = re.compile(rf"(?P<replica>[0-9a-f]{{32}}) {_NAME} {_WORKER}")

_log = logging.getLogger(__name__)


class SharedPrograms:
    """Tells other routers what `announcements` holds, and puts what they tell into `programs`."""

    def __init__(self, url: str, programs: Programs, announcements: Announcements, clock: Clock) -> None:
        self._url = url
        self._programs = programs
        self._announcements = announcements
        self._clock = clock
        self._replica = uuid.uuid4().hex
        self._outage_told = False
        self._served = False
        self.connected = False

    async def run(self) -> None:
        """Shares until it is cancelled. Nothing that Valkey does ends it; a try follows the other, with backoff."""
        delay = _FIRST_DELAY_S
        while True:
            try:
                await self._share()
            except Exception as error:  # noqa: BLE001 - a consumer loop, and a cache must never end the router
                if self._served:
                    delay, self._outage_told = _FIRST_DELAY_S, False
                else:  # also where it connects and then refuses what we need: no storm of tries, one line
                    delay = min(2 * delay, _LONGEST_DELAY_S)
                self._tell_outage(error)
            finally:
                self.connected = self._served = False
                metrics.VALKEY.set(0)
                self._count_dropped()
            await self._clock.sleep(delay)

    async def _share(self) -> None:
        """One connection, until it fails."""
        client = Redis.from_url(
            self._url,
            protocol=2,
            decode_responses=True,
            encoding_errors="replace",
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
        )
        async with client, client.pubsub() as channel:
            await channel.subscribe(CHANNEL)
            if await channel.get_message(timeout=ANSWER_S) is None:
                raise TimeoutError(f"no answer within {ANSWER_S:g} s")
            await self._write(client)
            self._tell_connected()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._load(client))
                tasks.create_task(self._listen(channel))
                tasks.create_task(self._write_behind(client))

    async def _load(self, client: Redis) -> None:
        """Reads what is there, as far as the map and a moderate time allow."""
        cursor, until = 0, self._clock.monotonic() + _LOAD_S
        while True:
            cursor, keys = await client.scan(cursor, match=PREFIX + "*", count=_BATCH)
            values = await client.mget(keys) if keys else []
            for key, value in zip(keys, values, strict=True):
                if value is not None:
                    self._take_kept(str(key), str(value))
            if not cursor or self._programs.full or self._clock.monotonic() > until:
                self._served = True
                return

    def _take_kept(self, key: str, value: str) -> None:
        named, kept = _KEY.fullmatch(key), _KEPT.fullmatch(value)
        if named is None or kept is None:
            metrics.PROGRAMS.labels("malformed").inc()
            return
        program = Program(named["pool"], named["digest"])
        if self._programs.loaded(program, kept["worker"], self._clock.monotonic()):
            metrics.PROGRAMS.labels("loaded").inc()

    async def _listen(self, channel: PubSub) -> None:
        """Hears the others. In silence it asks for a sign of life, so that a Valkey that hangs is noticed."""
        asked = False
        while True:
            message = await channel.get_message(timeout=ANSWER_S / 2)
            if message is not None:
                asked = False
                if message["type"] == "message":
                    self._take_heard(message["data"])
                await asyncio.sleep(0)  # a burst that lies in the buffer would not let others run
            elif asked:
                raise TimeoutError(f"no answer within {ANSWER_S / 2:g} s")
            else:
                await channel.ping()
                asked = True

    def _take_heard(self, text: str) -> None:
        heard = _HEARD.fullmatch(text)
        if heard is None:
            metrics.PROGRAMS.labels("malformed").inc()
        elif heard["replica"] != self._replica:
            program = Program(heard["pool"], heard["digest"])
            self._programs.heard(program, heard["worker"], self._clock.monotonic())
            metrics.PROGRAMS.labels("heard").inc()

    async def _write_behind(self, client: Redis) -> None:
        while True:
            await self._clock.sleep(_WRITE_EVERY_S)
            await self._write(client)

    async def _write(self, client: Redis) -> None:
        self._count_dropped()
        while batch := self._announcements.oldest(_BATCH):
            now = self._clock.monotonic()
            # After a long outage some are older than the map keeps them, or others were heard since.
            fresh = [
                (program, worker) for program, worker in batch if self._programs.home(program, now) == worker
            ]
            async with client.pipeline(transaction=False) as pipeline:
                for (pool, digest), worker_id in fresh:
                    name = f"{pool}:{digest}"
                    pipeline.set(PREFIX + name, worker_id, ex=math.ceil(self._programs.ttl_s))
                    pipeline.publish(CHANNEL, f"{self._replica} {name} {worker_id}")
                await pipeline.execute()
            self._announcements.told(batch)
            metrics.PROGRAMS.labels("announced").inc(len(fresh))
            metrics.PROGRAMS.labels("dropped").inc(len(batch) - len(fresh))

    def _count_dropped(self) -> None:
        metrics.PROGRAMS.labels("dropped").inc(self._announcements.take_dropped())

    def _tell_connected(self) -> None:
        self.connected, self._served = True, False
        metrics.VALKEY.set(1)
        _log.info("programs are shared through Valkey at %s", _place(self._url))

    def _tell_outage(self, error: BaseException) -> None:
        """Once an outage, however many tries it takes."""
        if self._outage_told:
            return
        self._outage_told = True
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = "Valkey at %s is away, programs are not shared until it is back: %s: %s"
        _log.warning(text, _place(self._url), type(error).__name__, error)


def _place(url: str) -> str:
    """Where the url points to, without user and password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
