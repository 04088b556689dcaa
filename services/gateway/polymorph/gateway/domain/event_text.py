"""Kept events as server-sent events."""

import json
import re

from polymorph.bus.port import Gap, StreamRecord

_SUBJECTS = re.compile(r"polymorph\.evt(\.([A-Za-z0-9_-]+|\*))*(\.>)?")
_POSITION = re.compile(r"[0-9A-Za-z]+-\d+")

HELLO = b"retry: 1000\n: watching\n\n"
HEARTBEAT = b": heartbeat\n\n"
AWAY = b": the event log is away\n\n"


def is_filter(subjects: str) -> bool:
    """Whether a watcher may ask for these subjects: facts alone."""
    return _SUBJECTS.fullmatch(subjects) is not None


def is_position(text: str) -> bool:
    """Whether `text` is `<epoch>-<sequence>`."""
    return _POSITION.fullmatch(text) is not None


def record_event(record: StreamRecord) -> bytes:
    """The fact's envelope under its position, which a watcher gives back as Last-Event-ID."""
    return f"id: {record.position}\ndata: {record.envelope.model_dump_json()}\n\n".encode()


def gap_event(gap: Gap) -> bytes:
    """A purged range. It has no id: who reconnects after it starts where it started before."""
    return f"event: gap\ndata: {json.dumps({'after': gap.after, 'resumes_at': gap.resumes_at})}\n\n".encode()
