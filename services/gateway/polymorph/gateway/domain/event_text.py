"""Kept events as server-sent events."""

import json
import re

from polymorph.bus.port import Gap, StreamRecord

_SUBJECTS = re.compile(r"polymorph\.evt(\.([A-Za-z0-9_-]+|\*))*(\.>)?")
_POSITION = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_BOUND = 2**63  # what the bus keeps a sequence in

HELLO = b"retry: 1000\n: watching\n\n"
HEARTBEAT = b": heartbeat\n\n"
AWAY = b": the event log is away\n\n"


def is_filter(subjects: str) -> bool:
    """Whether a watcher may ask for these subjects: facts alone."""
    return _SUBJECTS.fullmatch(subjects) is not None


def is_position(text: str) -> bool:
    """Whether `text` is `<epoch>-<sequence>`, both in digits and below 2^63."""
    position = _POSITION.fullmatch(text)
    return position is not None and all(int(number) < _BOUND for number in position.groups())


def record_event(record: StreamRecord) -> bytes:
    """The fact's envelope under its position, which a watcher gives back as Last-Event-ID."""
    return f"id: {record.position}\ndata: {record.envelope.model_dump_json()}\n\n".encode()


def gap_event(gap: Gap) -> bytes:
    """A purged range. It has no id: who reconnects after it starts where it started before."""
    return f"event: gap\ndata: {json.dumps({'after': gap.after, 'resumes_at': gap.resumes_at})}\n\n".encode()
