"""From type names to message classes: how a reader turns what it received into a message."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polymorph.events.base import Message
from polymorph.events.envelope import Envelope
from polymorph.events.requests import REQUESTS
from polymorph.events.types import MESSAGES

MESSAGE_TYPES: Mapping[str, type[Message]] = {cls.type_name(): cls for cls in (*MESSAGES, *REQUESTS)}


class Undecodable(ValueError):
    """These bytes are no message of the contract."""


def message_type(name: str) -> type[Message]:
    """The class of a type name.

    Raises:
        Undecodable: no such type.
    """
    try:
        return MESSAGE_TYPES[name]
    except KeyError:
        raise Undecodable(
            f"no message has the type {name!r}; the contract knows {len(MESSAGE_TYPES)}"
        ) from None


def open_envelope(body: bytes) -> Envelope:
    """Reads a CloudEvents envelope.

    Raises:
        Undecodable: no envelope.
    """
    try:
        return Envelope.model_validate_json(body)
    except ValidationError as error:
        raise Undecodable(f"no CloudEvents 1.0 envelope: {_first_error(error)}") from error


def message_of(envelope: Envelope) -> Message:
    """The message in an envelope.

    Raises:
        Undecodable: an unknown type, or data that does not fit it.
    """
    return _build(envelope.type, envelope.data)


def pack_telemetry(message: Message) -> bytes:
    """Telemetry on the wire: type and data alone."""
    return b'{"type":"%b","data":%b}' % (message.type_name().encode(), message.model_dump_json().encode())


def unpack_telemetry(body: bytes) -> Message:
    """Reads what `pack_telemetry` wrote.

    Raises:
        Undecodable: other bytes.
    """
    try:
        packed = json.loads(body)
    except ValueError as error:
        raise Undecodable("telemetry is one JSON object with type and data") from error
    if not isinstance(packed, dict) or not isinstance(packed.get("type"), str):
        raise Undecodable("telemetry is one JSON object with type and data")
    return _build(packed["type"], packed.get("data"))


def _build(name: str, data: Any) -> Message:
    cls = message_type(name)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise Undecodable(f"the data does not fit {name}: {_first_error(error)}") from error


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the body"
    return f"{place}: {first['msg']}"
