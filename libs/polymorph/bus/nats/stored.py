"""Reading what a stream keeps, by direct get: no consumer, no state on the server, nothing to make anew."""

import datetime as dt
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg
from nats.js import errors as js_errors

from polymorph.bus.nats.connection import Connection

NO_MESSAGES = "404"
END_OF_BATCH = "204"


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as its stream keeps it."""

    subject: str
    sequence: int
    data: bytes
    time: dt.datetime
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, msg: Msg) -> "Stored":
        headers = dict(msg.headers or {})
        return cls(
            subject=headers.pop("Nats-Subject"),
            sequence=int(headers.pop("Nats-Sequence")),
            data=msg.data,
            time=parse_time(headers.pop("Nats-Time-Stamp")),
            headers=headers,
        )


def parse_time(text: str) -> dt.datetime:
    """The server's RFC 3339 time; nanoseconds are cut to microseconds."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    parsed = dt.datetime.fromisoformat(f"{whole}+00:00")
    return parsed.replace(microsecond=int(f"{fraction[:6]:0<6}" or "0"))


async def last_stored(connection: Connection, stream: str, subject: str) -> Stored | None:
    """The last message that `stream` keeps under `subject`."""
    query = {"last_by_subj": subject}
    return await _one(connection, stream, query)


async def stored_at(connection: Connection, stream: str, sequence: int) -> Stored | None:
    """The message with that sequence."""
    return await _one(connection, stream, {"seq": sequence})


async def _one(connection: Connection, stream: str, query: dict[str, Any]) -> Stored | None:
    async def call(left: float) -> Msg:
        return await connection.client.request(_subject(stream), json.dumps(query).encode(), timeout=left)

    msg = await connection.until_answered(f"read {stream}", call)
    status = _status(msg)
    if status == NO_MESSAGES:
        return None
    _refuse(status, msg, stream)
    return Stored.of(msg)


async def read_batch(
    connection: Connection, stream: str, subject: str, *, first: int, count: int = 256
) -> list[Stored]:
    """Up to `count` messages under `subject` (wildcards allowed) from sequence `first` on, in order."""
    query = {"seq": max(first, 1), "next_by_subj": subject, "batch": count}

    async def call(left: float) -> list[Stored]:
        return await _collect(connection, stream, json.dumps(query).encode(), left)

    return await connection.until_answered(f"read {stream}", call)


async def read_all(connection: Connection, stream: str, subject: str) -> AsyncIterator[Stored]:
    """Every message under `subject`, batch by batch."""
    first = 1
    while batch := await read_batch(connection, stream, subject, first=first):
        for stored in batch:
            yield stored
        first = batch[-1].sequence + 1


async def _collect(connection: Connection, stream: str, query: bytes, left: float) -> list[Stored]:
    inbox = connection.client.new_inbox()
    answers = await connection.client.subscribe(inbox)
    try:
        await connection.client.publish(_subject(stream), query, reply=inbox)
        batch: list[Stored] = []
        while True:
            msg = await answers.next_msg(timeout=left)
            status = _status(msg)
            if status in (END_OF_BATCH, NO_MESSAGES):
                return batch
            if status == "503":
                raise js_errors.NoStreamResponseError
            _refuse(status, msg, stream)
            batch.append(Stored.of(msg))
    finally:
        if not connection.client.is_closed:
            await answers.unsubscribe()


def _subject(stream: str) -> str:
    return f"$JS.API.DIRECT.GET.{stream}"


def _status(msg: Msg) -> str | None:
    return (msg.headers or {}).get("Status")


def _refuse(status: str | None, msg: Msg, stream: str) -> None:
    if status is not None:
        description = (msg.headers or {}).get("Description", "")
        raise js_errors.ServerError(code=int(status), description=f"{stream}: {description}")
