"""Workers that settings name: they tell their models themselves."""

import asyncio
import datetime as dt
import json
import logging
from collections.abc import Sequence

from polymorph.config.clock import Clock
from polymorph.events.state import WorkerRecord
from polymorph.events.subjects import pool_id, token
from polymorph.gateway.adapters.connection import UpstreamError
from polymorph.gateway.adapters.upstream import Upstreams
from polymorph.gateway.domain.fleet import Fleet

_log = logging.getLogger(__name__)
_NEVER = dt.datetime.fromtimestamp(0, dt.UTC)


class StaticWorkers:
    """Asks each url for its models until it answers."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self._unknown = set(urls)
        self._clock = clock

    async def learn(self, fleet: Fleet, upstreams: Upstreams, timeout_s: float) -> None:
        """Adds those to `fleet` that answer by now."""
        await asyncio.gather(*(self._ask(url, fleet, upstreams, timeout_s) for url in list(self._unknown)))

    async def _ask(self, url: str, fleet: Fleet, upstreams: Upstreams, timeout_s: float) -> None:
        try:
            head, body = await upstreams.get(url, "/v1/models", timeout_s)
            entries = json.loads(body)["data"] if head.status == 200 else []
            records = [_record(url, entry["id"]) for entry in entries]
        except (UpstreamError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.info("worker %s tells no models yet: %s", url, error)
            return
        for record in records:
            fleet.put(record, self._clock.monotonic(), static=True)
        if records:
            self._unknown.discard(url)


def _record(url: str, model: object) -> WorkerRecord:
    if not isinstance(model, str):
        raise TypeError(f"the id of a model is {model!r}, not a text")
    return WorkerRecord(
        worker_id=token(f"{url} {model}"),
        pool=pool_id(model),
        model=model,
        url=url,
        state="ready",
        generation=0,
        revision="unknown",
        hardware="unknown",
        started_at=_NEVER,
    )
