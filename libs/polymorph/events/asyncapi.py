"""The AsyncAPI 3.0 document of the contract, made from the message classes.

`python -m polymorph.events.asyncapi docs/events/asyncapi.yaml` writes it; `--check` says whether it is current.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from polymorph.events.base import Event, Message, Telemetry
from polymorph.events.envelope import CONTENT_TYPE, Envelope
from polymorph.events.requests import ANSWERS, REQUESTS, Request
from polymorph.events.state import STATES
from polymorph.events.types import MESSAGES

Document = dict[str, Any]
_SCHEMA = "#/components/schemas/{model}"
_JSON = "application/json"
_ABOUT = (
    "What the services of Polymorph tell and ask each other over NATS. Facts (`evt`) and orders (`cmd`) are kept in "
    "JetStream inside a CloudEvents 1.0 envelope; telemetry (`tel`) and requests (`req`) are core NATS. "
    "Written from the point of view of a tool beside Polymorph: it receives facts and telemetry, and sends requests."
)

_EMBEDDED: Document = {
    "host": "127.0.0.1:{port}",
    "protocol": "nats",
    "description": (
        "The server that embedded mode starts. Its url stands under `nats` in run/supervisor.json of the data "
        "folder and in `polymorph status --json`; the password of the user `watch`, which may only read, in "
        "keys/nats.json. Use the inbox prefix _IV."
    ),
    "variables": {
        "port": {"description": "A free port, chosen at the first start and kept where it stays free."}
    },
}
_GATEWAY: Document = {
    "host": "127.0.0.1:8000",
    "pathname": "/v1/events",
    "protocol": "http",
    "description": (
        "Facts alone, as server-sent events; port 8000 unless another was chosen. `id` is the position, `data` the envelope. The query `subjects` "
        "filters. The header Last-Event-ID, else the query `since`, is the position to go on after (0-0: all that is "
        "kept); without one only what is new is sent. Where what follows the position was purged, a frame with "
        '`event: gap`, no `id`, and the data {"after": position, "resumes_at": position} comes first.'
    ),
}


def document() -> Document:
    """The whole document."""
    messages = (*MESSAGES, *REQUESTS)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Polymorph events",
            "version": "1.0.0",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": _JSON,
        "servers": {"embedded": _EMBEDDED, "gateway": _GATEWAY},
        "channels": {
            **{_name(cls): _channel(cls) for cls in messages},
            **{f"{_name(cls)}Reply": _reply_channel(cls) for cls in REQUESTS},
        },
        "operations": {_operation_name(cls): _operation(cls) for cls in messages},
        "components": {
            "messages": {
                **{_name(cls): _message(cls) for cls in messages},
                **{cls.__name__: _answer(cls) for answers in ANSWERS.values() for cls in answers},
            },
            "schemas": _schemas(),
        },
    }


def _name(cls: type[BaseModel]) -> str:
    """The class's name; a later version stands beside the first under its own."""
    version = getattr(cls, "VERSION", 1)
    return cls.__name__ if version == 1 else f"{cls.__name__}V{version}"


def _channel(cls: type[Message]) -> Document:
    return {
        "address": f"{cls.type_name()}.{{id}}",
        "description": _kept(cls),
        "servers": _servers(cls),
        "messages": {_name(cls): {"$ref": f"#/components/messages/{_name(cls)}"}},
        "parameters": {
            "id": {"description": "The pool, worker or hardware class: a token of A-Z a-z 0-9 _ -"}
        },
    }


def _kept(cls: type[Message]) -> str:
    return {
        "evt": "Kept in the stream POLYMORPH_EVT; repeated under polymorph.kept. once it is kept.",
        "cmd": "Kept in the work queue POLYMORPH_JOBS until it is done.",
        "tel": "Core NATS: seen by whoever listens now, and allowed to be lost.",
        "req": "Core NATS request.",
    }[cls.KIND]


def _servers(cls: type[Message]) -> list[Document]:
    names = ("embedded", "gateway") if cls.KIND == "evt" else ("embedded",)
    return [{"$ref": f"#/servers/{name}"} for name in names]


def _reply_channel(cls: type[Request]) -> Document:
    refs = {answer.__name__: {"$ref": f"#/components/messages/{answer.__name__}"} for answer in ANSWERS[cls]}
    return {"address": None, "description": f"Where {_name(cls)} is answered.", "messages": refs}


def _operation_name(cls: type[Message]) -> str:
    return f"{_action(cls)}{_name(cls)}"


def _action(cls: type[Message]) -> str:
    return "receive" if issubclass(cls, (Event, Telemetry)) else "send"


def _operation(cls: type[Message]) -> Document:
    channel = f"#/channels/{_name(cls)}"
    operation: Document = {
        "action": _action(cls),
        "channel": {"$ref": channel},
        "summary": _summary(cls),
        "messages": [{"$ref": f"{channel}/messages/{_name(cls)}"}],
    }
    if issubclass(cls, Request):
        reply = f"{channel}Reply"
        operation["reply"] = {
            "address": {
                "location": "$message.header#/replyTo",
                "description": "The reply subject of the NATS message; it may get several answers.",
            },
            "channel": {"$ref": reply},
            "messages": [{"$ref": f"{reply}/messages/{answer.__name__}"} for answer in ANSWERS[cls]],
        }
    return operation


def _message(cls: type[Message]) -> Document:
    data = {"$ref": _SCHEMA.format(model=cls.__name__)}
    enveloped = cls.KIND in ("evt", "cmd")
    message: Document = {
        "name": cls.type_name(),
        "title": _name(cls),
        "summary": _summary(cls),
        "contentType": CONTENT_TYPE if enveloped else _JSON,
    }
    if enveloped:
        message["headers"] = _headers()
        message["payload"] = _enveloped(cls, data)
    elif cls.KIND == "tel":
        kind = {"type": "string", "const": cls.type_name()}
        message["payload"] = {
            "type": "object",
            "required": ["type", "data"],
            "properties": {"type": kind, "data": data},
        }
    else:
        message["payload"] = data
    return message


def _headers() -> Document:
    return {
        "type": "object",
        "properties": {
            "Nats-Msg-Id": {
                "type": "string",
                "description": "Equal to the envelope's id; the same fact has one.",
            },
            "traceparent": {
                "type": "string",
                "description": "W3C trace context, where the sender had a span.",
            },
        },
    }


def _enveloped(cls: type[Message], data: Document) -> Document:
    own = {"type": {"const": cls.type_name()}, "data": data}
    return {"allOf": [{"$ref": _SCHEMA.format(model="Envelope")}, {"type": "object", "properties": own}]}


def _answer(cls: type[BaseModel]) -> Document:
    return {
        "name": cls.__name__,
        "title": cls.__name__,
        "summary": _summary(cls),
        "contentType": _JSON,
        "payload": {"$ref": _SCHEMA.format(model=cls.__name__)},
    }


def _summary(cls: type[BaseModel]) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]


def _schemas() -> Document:
    answers = [cls for kinds in ANSWERS.values() for cls in kinds]
    classes: list[type[BaseModel]] = [Envelope, *MESSAGES, *REQUESTS, *answers, *STATES]
    _, schema = models_json_schema([(cls, "serialization") for cls in classes], ref_template=_SCHEMA)
    definitions: Document = schema["$defs"]
    return definitions


def render() -> str:
    """The document as YAML."""
    return yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m polymorph.events.asyncapi", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where the file is not current"
    )
    options = parser.parse_args(arguments)
    path: Path = options.path
    text = render()
    if not options.check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return 0
    if path.exists() and path.read_text() == text:
        return 0
    sys.stderr.write(f"{path} is not current: run python -m polymorph.events.asyncapi {path}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
