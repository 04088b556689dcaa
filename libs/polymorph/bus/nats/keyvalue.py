"""Key-value buckets: reads by direct get, writes by publishing under the key's subject."""

from nats.js import errors as js_errors

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, NotFound, Unavailable
from polymorph.bus.nats.connection import Connection
from polymorph.bus.nats.stored import Stored, last_stored, read_all
from polymorph.bus.port import KeyValue

_WRONG_SEQUENCE = (10071, 10164)
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


def entry_of(bucket: str, stored: Stored) -> KeyValue:
    """What a bucket's stream keeps, as a value; deletion and expiry markers have None."""
    key = stored.subject.removeprefix(topology.key_subject(bucket, ""))
    gone = "KV-Operation" in stored.headers or "Nats-Marker-Reason" in stored.headers
    return KeyValue(key=key, value=None if gone else stored.data, revision=stored.sequence)


class Buckets:
    """All the buckets of the topology."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def entry(self, bucket: str, key: str) -> KeyValue | None:
        """The last entry of a key, deletions included."""
        subject = topology.key_subject(bucket, topology.checked_key(key))
        stored = await last_stored(self._connection, topology.bucket_stream(bucket), subject)
        return None if stored is None else entry_of(bucket, stored)

    async def get(self, bucket: str, key: str) -> KeyValue:
        entry = await self.entry(bucket, key)
        if entry is None or entry.value is None:
            raise NotFound(f"bucket {bucket} has no key {key!r}")
        return entry

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._write(bucket, key, value, {})

    async def create(self, bucket: str, key: str, value: bytes) -> int:
        try:
            return await self.update(bucket, key, value, 0)
        except Conflict:
            entry = await self.entry(bucket, key)
            if entry is None or entry.value is not None:
                raise
            return await self.update(bucket, key, value, entry.revision)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        return await self._write(bucket, key, value, {_EXPECTED: str(revision)})

    async def delete(self, bucket: str, key: str) -> None:
        await self._write(bucket, key, b"", {"KV-Operation": "DEL"})

    async def entries(self, bucket: str, pattern: str = ">") -> dict[str, KeyValue]:
        """The last entry of every key that matches, deletions included."""
        subject = topology.key_subject(bucket, pattern)
        stream = topology.bucket_stream(bucket)
        found: dict[str, KeyValue] = {}
        async for stored in read_all(self._connection, stream, subject):
            entry = entry_of(bucket, stored)
            found[entry.key] = entry
        return found

    async def _write(self, bucket: str, key: str, value: bytes, headers: dict[str, str]) -> int:
        subject = topology.key_subject(bucket, topology.checked_key(key))
        try:
            return await self._connection.store(subject, value, headers)
        except Unavailable as error:
            cause = error.__cause__
            if isinstance(cause, js_errors.APIError) and cause.err_code in _WRONG_SEQUENCE:
                raise Conflict(f"{bucket}/{key} is not at revision {headers.get(_EXPECTED)}") from error
            raise
