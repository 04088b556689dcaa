"""The envelope of every message that is kept: CloudEvents 1.0, JSON structured mode."""

import datetime as dt
import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polymorph.events.base import Message

CONTENT_TYPE = "application/cloudevents+json"


class Envelope(BaseModel):
    """A CloudEvents 1.0 envelope; `id` is deterministic and doubles as `Nats-Msg-Id`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    specversion: Literal["1.0"] = "1.0"
    id: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(description="the service and instance, for example /polymorph/router/r1")]
    type: Annotated[str, Field(description="polymorph.<kind>.<domain>.<event>.v<version>")]
    subject: Annotated[str, Field(description="the id that ends the NATS subject")]
    time: dt.datetime
    datacontenttype: Literal["application/json"] = "application/json"
    data: dict[str, Any]


def message_id(message: Message, source: str) -> str:
    """The deterministic id of a message: the same fact told twice by one source has one id.

    Facts carry their own identity (ids, generations, window starts) in their fields, so the digest over type and
    content names the fact. The time of sending is not part of it.
    """
    body = message.model_dump_json()
    return hashlib.sha256(f"{message.type_name()}\n{source}\n{body}".encode()).hexdigest()[:32]


def wrap(message: Message, *, source: str, time: dt.datetime) -> Envelope:
    """Puts `message` into an envelope."""
    return Envelope(
        id=message_id(message, source),
        source=source,
        type=message.type_name(),
        subject=message.subject_id(),
        time=time,
        data=message.model_dump(mode="json"),
    )
