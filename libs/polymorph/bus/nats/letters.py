"""Dead letters: what no handler could take, with the reason, until a person retries or drops it."""

import logging
from urllib.parse import quote, unquote

from nats.aio.msg import Msg
from nats.js import errors as js_errors

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.nats.connection import Connection, told_as_bus_errors
from polymorph.bus.nats.stored import Stored, read_all, stored_at
from polymorph.bus.port import DeadLetter

log = logging.getLogger(__name__)

_SUBJECT = "Polymorph-Subject"
_DURABLE = "Polymorph-Durable"
_REASON = "Polymorph-Reason"
_ATTEMPTS = "Polymorph-Attempts"
_MESSAGE_ID = "Nats-Msg-Id"
_OWN = frozenset({_SUBJECT, _DURABLE, _REASON, _ATTEMPTS, _MESSAGE_ID})
_ORIGINAL_ID = "Polymorph-Message-Id"
_REASON_CHARS = 1000


class DeadLetters:
    """The stream of dead letters."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def add(self, msg: Msg, *, durable: str, reason: str) -> None:
        """Keeps `msg` as a dead letter; once, however often it is told."""
        metadata = msg.metadata
        headers = {k: v for k, v in (msg.headers or {}).items() if k not in _OWN}
        if original := (msg.headers or {}).get(_MESSAGE_ID):
            headers[_ORIGINAL_ID] = original
        headers |= {
            _SUBJECT: msg.subject,
            _DURABLE: durable,
            _REASON: quote(reason[:_REASON_CHARS]),
            _ATTEMPTS: str(metadata.num_delivered),
            _MESSAGE_ID: f"{metadata.stream}.{metadata.sequence.stream}.{durable}",
        }
        log.warning("dead letter: %s for %s: %s", msg.subject, durable, reason)
        await self._connection.store(f"polymorph.dlq.{durable}", msg.data, headers)

    async def all(self) -> list[DeadLetter]:
        stream, subjects = topology.DEAD_LETTERS_STREAM, topology.DEAD_LETTERS_SUBJECTS
        return [_letter(stored) async for stored in read_all(self._connection, stream, subjects)]

    async def retry(self, letter_id: str) -> None:
        """Publishes the message anew, under an id of its own lest it be taken for the duplicate it is."""
        letter = _letter(await self._stored(letter_id))
        headers = {k: v for k, v in letter.headers.items() if k not in _OWN and k != _ORIGINAL_ID}
        headers[_MESSAGE_ID] = f"retry.{letter_id}.{letter.headers.get(_ORIGINAL_ID, '')}"
        await self._connection.store(letter.subject, letter.body, headers)
        await self.drop(letter_id)

    async def drop(self, letter_id: str) -> None:
        stored = await self._stored(letter_id)

        async def call(left: float) -> None:
            del left
            try:
                await self._connection.jetstream.delete_msg(topology.DEAD_LETTERS_STREAM, stored.sequence)
            except js_errors.NotFoundError:
                log.debug("letter %s was dropped by somebody else", letter_id)

        await self._connection.until_answered(f"drop letter {letter_id}", call)

    async def _stored(self, letter_id: str) -> Stored:
        if not (letter_id.isascii() and letter_id.isdigit() and int(letter_id) > 0):
            raise NotFound(f"no dead letter {letter_id!r}: the id is a positive number")
        with told_as_bus_errors(f"letter {letter_id}"):
            stored = await stored_at(self._connection, topology.DEAD_LETTERS_STREAM, int(letter_id))
        if stored is None:
            raise NotFound(f"no dead letter {letter_id}")
        return stored


def _letter(stored: Stored) -> DeadLetter:
    headers = stored.headers
    return DeadLetter(
        letter_id=str(stored.sequence),
        subject=headers.get(_SUBJECT, ""),
        durable=headers.get(_DURABLE, ""),
        reason=unquote(headers.get(_REASON, "")),
        attempts=int(headers.get(_ATTEMPTS, "0")),
        at=stored.time,
        body=stored.data,
        headers={k: v for k, v in headers.items() if not k.startswith("Nats-") or k == _MESSAGE_ID},
    )
