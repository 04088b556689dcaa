"""Makes streams, buckets and the object store what they should be, however often it is called."""

import asyncio
import json
import logging
import urllib.request
from dataclasses import dataclass
from typing import Literal

from nats.js import JetStreamContext, api
from nats.js import errors as js_errors

from polymorph.bus import topology
from polymorph.bus.errors import Fatal, Unavailable
from polymorph.bus.nats.bus import NatsBus
from polymorph.bus.nats.connection import Connection
from polymorph.config.settings import NatsSettings

log = logging.getLogger(__name__)

MIB = 1024 * 1024
DAY_S = 86_400.0
DUPLICATES_S = 120.0
DESIRED_HISTORY = 16

Sync = Literal["always", "not-always", "unknown"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept. Bytes and seconds."""

    events_bytes: int = 1024 * MIB
    events_age_s: float = 30 * DAY_S
    jobs_bytes: int = 256 * MIB
    captures_bytes: int = 1024 * MIB
    dead_letters_bytes: int = 128 * MIB
    dead_letters_age_s: float = 90 * DAY_S
    duplicates_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What was changed, and whether the server writes to disk before it acknowledges."""

    changes: tuple[str, ...]
    sync: Sync


def wanted_streams(limits: Limits, replicas: int) -> list[api.StreamConfig]:
    """The whole topology as stream configurations."""
    return [
        _stream(
            topology.EVENTS_STREAM,
            topology.EVENTS_SUBJECTS,
            replicas,
            max_bytes=limits.events_bytes,
            max_age=limits.events_age_s,
            duplicate_window=limits.duplicates_s,
            republish=api.RePublish(src=topology.EVENTS_SUBJECTS, dest=f"{topology.KEPT_EVENTS}.>"),
        ),
        _stream(
            topology.JOBS_STREAM,
            topology.JOBS_SUBJECTS,
            replicas,
            retention=api.RetentionPolicy.WORK_QUEUE,
            # Work that does not fit is refused to whoever gives it, and never drops older work.
            discard=api.DiscardPolicy.NEW,
            max_bytes=limits.jobs_bytes,
            duplicate_window=limits.duplicates_s,
        ),
        _stream(
            topology.DEAD_LETTERS_STREAM,
            topology.DEAD_LETTERS_SUBJECTS,
            replicas,
            max_bytes=limits.dead_letters_bytes,
            max_age=limits.dead_letters_age_s,
            duplicate_window=limits.duplicates_s,
        ),
        *(_bucket(bucket, replicas) for bucket in topology.BUCKETS),
        _objects(topology.ARTIFACTS, replicas),
        _objects(topology.CAPTURES, replicas).evolve(
            max_age=topology.CAPTURES_AGE_S, max_bytes=limits.captures_bytes
        ),
    ]


def _stream(name: str, subjects: str, replicas: int, **options: object) -> api.StreamConfig:
    config = api.StreamConfig(
        name=name,
        subjects=[subjects],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        num_replicas=replicas,
        duplicate_window=DUPLICATES_S,
        allow_direct=True,
    )
    return config.evolve(**options)


def _bucket(bucket: str, replicas: int) -> api.StreamConfig:
    """A bucket in NATS's own layout, whose entries the server repeats once they are kept."""
    ttl = topology.BUCKET_TTL_S.get(bucket, 0.0)
    return _stream(
        topology.bucket_stream(bucket),
        topology.key_subject(bucket, ">"),
        replicas,
        max_msgs_per_subject=DESIRED_HISTORY if bucket == topology.DESIRED else 1,
        max_age=ttl,
        duplicate_window=min(DUPLICATES_S, ttl) if ttl else DUPLICATES_S,
        discard=api.DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        deny_delete=True,
        republish=api.RePublish(
            src=topology.key_subject(bucket, ">"), dest=f"{topology.KEPT_VALUES}.{bucket}.>"
        ),
    )


def _objects(store: str, replicas: int) -> api.StreamConfig:
    config = _stream(topology.object_stream(store), "", replicas)
    return config.evolve(
        subjects=[f"$O.{store}.C.>", f"$O.{store}.M.>"],
        discard=api.DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
    )


_COMPARED = (
    "subjects",
    "storage",
    "num_replicas",
    "allow_direct",
    "max_msgs_per_subject",
    "max_age",
    "duplicate_window",
    "discard",
    "allow_rollup_hdrs",
    "deny_delete",
    "republish",
)


def differences(held: api.StreamConfig, wanted: api.StreamConfig) -> tuple[str, ...]:
    """The names of the options in which a stream is not as wanted."""
    names = [name for name in _COMPARED if _plain(held, name) != _plain(wanted, name)]
    if (held.max_bytes or -1) != (wanted.max_bytes or -1):
        names.append("max_bytes")
    return tuple(names)


def _plain(config: api.StreamConfig, name: str) -> object:
    value = getattr(config, name)
    if isinstance(value, api.RePublish):
        return value.src, value.dest
    return value or None


async def provision(
    server: NatsSettings | NatsBus,
    *,
    replicas: int = 1,
    limits: Limits | None = None,
    monitor_url: str | None = None,
    require_sync: bool = True,
    wait_s: float = 30.0,
) -> Provisioned:
    """Makes the topology what it should be, over a bus or a connection made for it (in an account with JetStream).

    `monitor_url` is the server's monitoring endpoint, for example http://127.0.0.1:8222; with it, a server that does
    not write to disk before it acknowledges is refused.

    Raises:
        Fatal: the server loses acknowledged writes on a power failure, or a stream exists with another retention.
        Unavailable: no server within `wait_s`.
    """
    wanted = wanted_streams(limits or Limits(), replicas)
    if isinstance(server, NatsBus):
        changes = await _make_all(server.connection, wanted)
    else:
        connection = Connection(timeout_s=10.0)
        await connection.open(server, name="/polymorph/provision", wait_s=wait_s)
        try:
            changes = await _make_all(connection, wanted)
        finally:
            await connection.close()
    sync = await asyncio.to_thread(sync_mode, monitor_url)
    _judge_sync(sync, monitor_url, require_sync=require_sync)
    return Provisioned(changes, sync)


async def _make_all(connection: Connection, wanted: list[api.StreamConfig]) -> tuple[str, ...]:
    made = [await _make(connection, config) for config in wanted]
    return tuple(change for change in made if change is not None)


async def _make(connection: Connection, wanted: api.StreamConfig) -> str | None:
    jetstream = connection.jetstream

    async def call(left: float) -> str | None:
        del left
        return await _compare_and_make(jetstream, wanted)

    return await connection.until_answered(f"provision {wanted.name}", call)


async def _compare_and_make(jetstream: JetStreamContext, wanted: api.StreamConfig) -> str | None:
    name = wanted.name or ""
    try:
        held = (await jetstream.stream_info(name)).config
    except js_errors.NotFoundError:
        await jetstream.add_stream(wanted)
        return f"{name}: created"
    if held.retention != wanted.retention:
        raise Fatal(
            f"stream {name} has retention {held.retention}, not {wanted.retention}: delete it or rename it"
        )
    changed = differences(held, wanted)
    if not changed:
        return None
    await jetstream.update_stream(wanted)
    return f"{name}: updated {', '.join(changed)}"


def sync_mode(monitor_url: str | None) -> Sync:
    """Whether the server syncs each write, as its monitoring endpoint says."""
    if monitor_url is None:
        return "unknown"
    if not monitor_url.startswith(("http://", "https://")):
        raise ValueError(f"{monitor_url!r} is no monitoring endpoint: for example http://127.0.0.1:8222")
    try:
        with urllib.request.urlopen(f"{monitor_url}/varz", timeout=5) as answer:  # noqa: S310 - checked above
            config = json.load(answer).get("jetstream", {}).get("config", {})
    except OSError as error:
        raise Unavailable(f"the monitoring endpoint {monitor_url} does not answer: {error}") from error
    if not config:
        return "unknown"
    return "always" if config.get("sync_always") else "not-always"


def _judge_sync(sync: Sync, monitor_url: str | None, *, require_sync: bool) -> None:
    if sync == "unknown":
        log.warning(
            "cannot tell whether NATS syncs each write (%s): set `sync_interval: always` in its jetstream block",
            "no monitoring endpoint was given" if monitor_url is None else f"{monitor_url} does not say",
        )
    elif sync == "not-always":
        line = "NATS loses acknowledged writes on a power failure: set `sync_interval: always` in its jetstream block"
        if require_sync:
            raise Fatal(line)
        log.warning("%s", line)
