"""What was once sent is still understood, and what is sent has not changed.

`POLYMORPH_WRITE_GOLDEN=1 pytest tests/contract/events` writes the files of parts that gained a field, and keeps each
old one beside the new as `<name>.until-<n>.json`: it must load for ever.
"""

import datetime as dt
import enum
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from polymorph.events.base import Command, Event, Message, Telemetry
from polymorph.events.envelope import wrap
from polymorph.events.registry import (
    MESSAGE_TYPES,
    message_of,
    open_envelope,
    pack_telemetry,
    unpack_telemetry,
)
from polymorph.events.requests import ANSWERS, REQUESTS
from polymorph.events.state import STATES
from polymorph.events.types import MESSAGES

FOLDER = Path(__file__).parent / "golden"
SOURCE = "/polymorph/golden/0"
WHEN = dt.datetime(2026, 11, 1, 12, 30, 15, 250000, tzinfo=dt.UTC)
ALL: tuple[type[BaseModel], ...] = (
    *MESSAGES,
    *REQUESTS,
    *(answer for answers in ANSWERS.values() for answer in answers),
    *STATES,
)


def sample(cls: type[BaseModel]) -> BaseModel:
    """An instance with every field set to something that tells which field it is."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(hints[name], name) for name in cls.model_fields})


PLAIN: dict[Any, Any] = {int: 3, float: 0.25, bool: True, dt.datetime: WHEN}


def _value(kind: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in arguments if a is not types.NoneType), name)
    if origin in (tuple, dict):
        inner = _value(arguments[origin is dict], name)
        return (inner,) if origin is tuple else {"8": inner}
    if issubclass(kind, BaseModel):
        return sample(kind)
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    return name.replace("_", "-") if kind is str else PLAIN[kind]


def golden_name(cls: type[BaseModel]) -> str:
    """Messages by their type name, which holds the version; the rest by their class."""
    named = getattr(cls, "type_name", None)
    return named() if named is not None else cls.__name__


def on_the_wire(value: BaseModel) -> bytes:
    if isinstance(value, (Event, Command)):
        return wrap(value, source=SOURCE, time=WHEN).model_dump_json().encode()
    if isinstance(value, Telemetry):
        return pack_telemetry(value)
    return value.model_dump_json().encode()


def from_the_wire(cls: type[BaseModel], body: bytes) -> BaseModel:
    if issubclass(cls, (Event, Command)):
        return message_of(open_envelope(body))
    if issubclass(cls, Telemetry):
        return unpack_telemetry(body)
    return cls.model_validate_json(body)


def pretty(body: bytes) -> str:
    return json.dumps(json.loads(body), indent=2) + "\n"


def write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() != text:
        older = len(list(FOLDER.glob(f"{path.stem}.until-*.json")))
        path.rename(path.with_name(f"{path.stem}.until-{older + 1}.json"))
    path.write_text(text)


@pytest.fixture(params=ALL, ids=golden_name)
def part(request: pytest.FixtureRequest) -> type[BaseModel]:
    return request.param


def test_it_is_sent_as_it_was(part):
    path = FOLDER / f"{golden_name(part)}.json"
    text = pretty(on_the_wire(sample(part)))
    if os.environ.get("POLYMORPH_WRITE_GOLDEN") == "1":
        write(path, text)
    assert path.read_text() == text


def test_what_was_sent_is_understood(part):
    name = golden_name(part)
    paths = [FOLDER / f"{name}.json", *FOLDER.glob(f"{name}.until-*.json")]
    for path in paths:
        understood = from_the_wire(part, path.read_bytes())
        assert type(understood) is part
        sent = json.loads(path.read_text())
        told = json.loads(on_the_wire(understood))
        assert_nothing_lost(sent.get("data", sent), told.get("data", told), path.name)
    assert from_the_wire(part, paths[0].read_bytes()) == sample(part)


def assert_nothing_lost(sent: Any, told: Any, where: str) -> None:
    """Every field that was ever sent still exists under its name: a rename or a removal is a new version."""
    if isinstance(sent, dict):
        assert set(sent) <= set(told), f"{where} lost {set(sent) - set(told)}"
        for key, value in sent.items():
            assert_nothing_lost(value, told[key], f"{where}.{key}")


def test_a_field_nobody_knows_yet_is_ignored(part):
    body = json.loads(on_the_wire(sample(part)))
    body.get("data", body)["field_of_next_year"] = 1
    assert from_the_wire(part, json.dumps(body).encode()) == sample(part)


def test_every_golden_file_belongs_to_a_part():
    known = {golden_name(cls) for cls in ALL}
    assert {path.name.removesuffix(".json").split(".until-")[0] for path in FOLDER.iterdir()} == known


def test_every_message_class_is_in_the_contract():
    def below(cls: type[Message]) -> set[type[Message]]:
        return {cls, *(deeper for sub in cls.__subclasses__() for deeper in below(sub))}

    concrete = {
        cls
        for cls in below(Message)
        if "NAME" in cls.__dict__ and cls.__module__.startswith("polymorph.events.")
    }
    assert concrete == set(MESSAGE_TYPES.values())
    assert len(MESSAGE_TYPES) == len(MESSAGES) + len(REQUESTS)
