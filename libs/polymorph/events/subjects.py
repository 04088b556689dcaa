"""Subjects: `polymorph.<kind>.<domain>.<event>.v<version>.<id>`, and the tokens they are made of."""

import hashlib
import re
from typing import Literal

Kind = Literal["evt", "cmd", "req", "tel"]

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_UNSAFE = re.compile(r"[^a-z0-9]+")


def is_token(text: str) -> bool:
    """Whether `text` may stand between two dots of a subject."""
    return _TOKEN.fullmatch(text) is not None


def token(text: str) -> str:
    """A subject token for any text: a readable stem and a digest, so that two texts never share one.

    Model names and users' texts never stand in a subject as they came.
    """
    stem = _UNSAFE.sub("-", text.lower()).strip("-")[:40] or "x"
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def pool_id(model: str) -> str:
    """The id of the pool that serves `model` (the name that clients send)."""
    return token(model)


def subject(kind: Kind, domain: str, event: str, version: int, subject_id: str) -> str:
    """Joins and checks the parts of a subject.

    Raises:
        ValueError: a part that is no token.
    """
    for part in (domain, event, subject_id):
        if not (is_token(part) or part == "*"):
            raise ValueError(f"{part!r} cannot stand in a subject: use only A-Z a-z 0-9 _ and -")
    return f"polymorph.{kind}.{domain}.{event}.v{version}.{subject_id}"
