"""Outbox and inbox: what is said and heard in the same transaction as what is done."""

import datetime as dt
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError
from sqlmodel import Session, col, select

from polymorph.events.base import Command, Event
from polymorph.events.envelope import message_id
from polymorph.events.types import COMMANDS, EVENTS
from polymorph.ledger.insertion import insert_once
from polymorph.ledger.tables import InboxRow, OutboxRow

Kept = type[Event] | type[Command]

_KEPT: tuple[Kept, ...] = (*EVENTS, *COMMANDS)
_TYPES: dict[str, Kept] = {kind.type_name(): kind for kind in _KEPT}


class UnknownMessage(ValueError):
    """A row holds no message that this release has."""


def encode(message: Event | Command) -> dict[str, Any]:
    """A message as it lies in a row."""
    return {"type": message.type_name(), "data": message.model_dump(mode="json")}


def decode(type_name: str, data: dict[str, Any]) -> Event | Command:
    """The message of a row. Raises `UnknownMessage`."""
    kind = _TYPES.get(type_name)
    if kind is None:
        raise UnknownMessage(f"{type_name!r} is no kept message of this release; known are {sorted(_TYPES)}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UnknownMessage(f"the data does not fit {type_name}: {error}") from error


def enqueue(session: Session, message: Event | Command, *, source: str, now: dt.datetime) -> None:
    """Puts `message` into the outbox once, however often the same fact is told."""
    insert_once(session, OutboxRow, message_id=message_id(message, source), created_at=now, **encode(message))


def pending(session: Session, limit: int, *, parked: Collection[int] = ()) -> list[OutboxRow]:
    """What is still to be published, oldest first, without the sequences in `parked`."""
    statement = select(OutboxRow).where(col(OutboxRow.published_at).is_(None))
    if parked:
        statement = statement.where(col(OutboxRow.sequence).not_in(parked))
    return list(session.exec(statement.order_by(col(OutboxRow.sequence)).limit(limit)))


def mark_published(session: Session, sequence: int, now: dt.datetime) -> None:
    row = session.get(OutboxRow, sequence)
    if row is not None and row.published_at is None:
        row.published_at = now


def first_time(session: Session, consumer: str, identity: str, now: dt.datetime) -> bool:
    """Whether `consumer` meets this message for the first time; it is remembered with the rest of the transaction."""
    return insert_once(session, InboxRow, consumer=consumer, message_id=identity, received_at=now)
