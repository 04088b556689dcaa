"""What several in-memory buses share: streams, durables, buckets, objects, and who listens."""

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, Unavailable
from polymorph.bus.pattern import matches
from polymorph.bus.port import DeadLetter, KeyValue, Responder
from polymorph.bus.position import Extent

DUPLICATES = dt.timedelta(seconds=600)


@dataclass(frozen=True, slots=True)
class Kept:
    """A message in a stream."""

    sequence: int
    subject: str
    body: bytes
    at: dt.datetime


class MemoryStream:
    """Messages in order; a message id that comes again within ten minutes is the same message."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.last = 0
        self._first = 1
        self._kept: dict[int, Kept] = {}
        self._ids: dict[str, tuple[int, dt.datetime]] = {}

    @property
    def extent(self) -> Extent:
        return Extent(self.epoch, self._first, self.last)

    def append(self, subject: str, body: bytes, at: dt.datetime, message_id: str) -> int:
        known = self._ids.get(message_id)
        if known is not None and at - known[1] < DUPLICATES:
            return known[0]
        self.last += 1
        self._kept[self.last] = Kept(self.last, subject, body, at)
        self._ids[message_id] = (self.last, at)
        return self.last

    def get(self, sequence: int) -> Kept | None:
        return self._kept.get(sequence)

    def remove(self, sequence: int) -> None:
        self._kept.pop(sequence, None)

    def purge(self, below: int) -> None:
        """Drops every message whose sequence is lower."""
        self._first = max(self._first, min(below, self.last + 1))
        for sequence in [s for s in self._kept if s < self._first]:
            del self._kept[sequence]

    def after(self, sequence: int, pattern: str) -> Iterator[Kept]:
        """Messages beyond `sequence` that match, in order."""
        for number in range(max(sequence + 1, self._first), self.last + 1):
            kept = self._kept.get(number)
            if kept is not None and matches(pattern, kept.subject):
                yield kept


@dataclass(slots=True)
class MemoryDurable:
    """How far a durable consumer is, and what comes again when. `due` and times are the clock's seconds."""

    cursor: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)

    def take(self, stream: MemoryStream, pattern: str, now: float) -> tuple[Kept, int] | None:
        """The next message with the number of this attempt."""
        for sequence, at in sorted(self.due.items()):
            if at <= now:
                del self.due[sequence]
                kept = stream.get(sequence)
                if kept is not None:
                    return self._attempt(kept)
        for kept in stream.after(self.cursor, pattern):
            self.cursor = kept.sequence
            return self._attempt(kept)
        return None

    def _attempt(self, kept: Kept) -> tuple[Kept, int]:
        self.attempts[kept.sequence] = self.attempts.get(kept.sequence, 0) + 1
        return kept, self.attempts[kept.sequence]

    def next_due(self) -> float | None:
        return min(self.due.values(), default=None)


class MemoryBucket:
    """Keys with values, a revision that grows, and an age at which they expire."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self._revision = 0
        self._entries: dict[str, tuple[KeyValue, float]] = {}
        self._watchers: list[tuple[str, asyncio.Queue[KeyValue]]] = []

    def entries(self, now: float) -> dict[str, KeyValue]:
        """Every entry that has not expired; deleted ones have no value."""
        self.expire(now)
        return {key: entry for key, (entry, _) in self._entries.items()}

    def write(self, key: str, value: bytes | None, now: float, expected: int | None = None) -> int:
        """Raises `Conflict` where the key is not at revision `expected`."""
        self.expire(now)
        held = self._entries.get(key)
        if expected is not None and (held[0].revision if held else 0) != expected:
            raise Conflict(f"{key} is not at revision {expected}")
        self._revision += 1
        entry = KeyValue(key, value, self._revision)
        self._entries[key] = (entry, now)
        self._tell(entry)
        return self._revision

    def expire(self, now: float) -> None:
        if self._ttl_s is None:
            return
        for key, (entry, written) in list(self._entries.items()):
            if now - written >= self._ttl_s:
                del self._entries[key]
                if entry.value is not None:
                    self._tell(replace(entry, value=None))

    def next_expiry(self) -> float | None:
        if self._ttl_s is None or not self._entries:
            return None
        return min(written for _, written in self._entries.values()) + self._ttl_s

    def watch(self, pattern: str, now: float) -> "asyncio.Queue[KeyValue]":
        news: asyncio.Queue[KeyValue] = asyncio.Queue()
        for key, entry in sorted(self.entries(now).items()):
            if entry.value is not None and matches(pattern, key):
                news.put_nowait(entry)
        self._watchers.append((pattern, news))
        return news

    def unwatch(self, news: "asyncio.Queue[KeyValue]") -> None:
        self._watchers = [(pattern, queue) for pattern, queue in self._watchers if queue is not news]

    def _tell(self, entry: KeyValue) -> None:
        for pattern, news in self._watchers:
            if matches(pattern, entry.key):
                news.put_nowait(entry)


Listener = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryResponder:
    """Who answers a pattern of request subjects; of one group, one answers."""

    pattern: str
    group: str | None
    answer: Responder


class MemoryWorld:
    """One "server" for any number of in-memory buses. `available = False` is a server that is away."""

    def __init__(self, epoch: int = 1) -> None:
        self._available = True
        self.objects: dict[str, dict[str, bytes]] = {store: {} for store in topology.STORES}
        self.letters: dict[str, DeadLetter] = {}
        self.listeners: list[tuple[str, Listener]] = []
        self.responders: list[MemoryResponder] = []
        self.streams = {
            topology.EVENTS_STREAM: MemoryStream(epoch),
            topology.JOBS_STREAM: MemoryStream(epoch),
        }
        self.durables: dict[tuple[str, str], MemoryDurable] = {}
        self.buckets = {name: MemoryBucket(topology.BUCKET_TTL_S.get(name)) for name in topology.BUCKETS}
        self._changed = asyncio.Event()
        self._letter = 0
        self._turn = 0

    @property
    def available(self) -> bool:
        return self._available

    @available.setter
    def available(self, there: bool) -> None:
        self._available = there
        self.tell_change()

    def check(self) -> None:
        """Raises `Unavailable` while the server is away."""
        if not self.available:
            raise Unavailable("the server is away")

    def bucket(self, name: str) -> MemoryBucket:
        self.check()
        try:
            return self.buckets[name]
        except KeyError:
            raise Unavailable(f"no bucket {name!r}: one of {', '.join(topology.BUCKETS)}") from None

    def renew_events(self, epoch: int) -> None:
        """Makes the event stream anew, as after a loss of its files."""
        self.streams[topology.EVENTS_STREAM] = MemoryStream(epoch)
        self.tell_change()

    def tell_change(self) -> None:
        """Wakes whoever waits for a change of any stream."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking."""
        return self._changed

    def add_letter(self, letter: DeadLetter) -> None:
        self._letter += 1
        letter_id = str(self._letter)
        self.letters[letter_id] = replace(letter, letter_id=letter_id)

    def responders_for(self, subject: str) -> list[MemoryResponder]:
        """Everybody without a group, and one of each group in turn."""
        asked = [r for r in self.responders if matches(r.pattern, subject)]
        chosen = [r for r in asked if r.group is None]
        self._turn += 1
        for group in sorted({r.group for r in asked if r.group is not None}):
            members = [r for r in asked if r.group == group]
            chosen.append(members[self._turn % len(members)])
        return chosen
