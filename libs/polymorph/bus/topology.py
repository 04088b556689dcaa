"""The names of what is provisioned: streams, buckets, the object store."""

import re

EVENTS_STREAM = "POLYMORPH_EVT"
JOBS_STREAM = "POLYMORPH_JOBS"
DEAD_LETTERS_STREAM = "POLYMORPH_DLQ"

DESIRED = "desired"
WORKERS = "workers"
LEASES = "leases"
RESTARTS = "restarts"
"""Key = pool: the worker that restarts its engine, of which there is one at a time."""
WORKLOADS = "workloads"
"""Key = pool.definition.digest: a workload that was captured; gone when its inputs are."""
QUARANTINE = "quarantine"
FREEZE = "freeze"
PAUSE = "pause"
BUCKETS = (DESIRED, WORKERS, LEASES, RESTARTS, WORKLOADS, QUARANTINE, FREEZE, PAUSE)
ARTIFACTS = "artifacts"
CAPTURES = "captures"
"""Objects that derive from users' content: they expire."""
STORES = (ARTIFACTS, CAPTURES)

WORKERS_TTL_S = 10.0
LEASES_TTL_S = 15.0
CAPTURES_AGE_S = 86_400.0
BUCKET_TTL_S = {
    WORKERS: WORKERS_TTL_S,
    LEASES: LEASES_TTL_S,
    RESTARTS: LEASES_TTL_S,
    WORKLOADS: CAPTURES_AGE_S,
}

EVENTS_SUBJECTS = "polymorph.evt.>"
JOBS_SUBJECTS = "polymorph.cmd.>"
DEAD_LETTERS_SUBJECTS = "polymorph.dlq.>"

KEPT_EVENTS = "polymorph.kept"
"""Where the server repeats an event once it is kept: `polymorph.kept.<domain>.<event>...`, core NATS."""
EVENTS_DESCRIPTION = "polymorph.look.POLYMORPH_EVT"
"""Where an account without JetStream of its own asks for the description of the event stream."""
KEPT_VALUES = "polymorph.kv"
"""Where the server repeats a key-value entry once it is kept: `polymorph.kv.<bucket>.<key>`, core NATS."""


def bucket_stream(bucket: str) -> str:
    """The stream behind a key-value bucket."""
    return f"KV_{bucket}"


def key_subject(bucket: str, key: str) -> str:
    """The subject that a key is kept under."""
    return f"$KV.{bucket}.{key}"


def object_stream(store: str) -> str:
    """The stream behind an object store."""
    return f"OBJ_{store}"


def stream_of(subject: str) -> str:
    """The stream that keeps messages of `subject`.

    Raises:
        ValueError: neither an event's subject nor a command's.
    """
    for prefix, stream in (("polymorph.evt.", EVENTS_STREAM), ("polymorph.cmd.", JOBS_STREAM)):
        if subject.startswith(prefix):
            return stream
    raise ValueError(f"{subject!r} is not kept: name a subject under polymorph.evt. or polymorph.cmd.")


_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


def checked_key(key: str) -> str:
    """Raises `ValueError` for what cannot be a key."""
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"{key!r} is no key: use A-Z a-z 0-9 - / _ = and single dots between them")
    return key
