"""The loop's memory in the ledger: state, record and outbox in one transaction."""

import datetime as dt
import logging
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlmodel import Session

from polymorph.compiler.adapters import metrics
from polymorph.compiler.domain.knowledge import Knowledge
from polymorph.compiler.domain.search_pool import Learn, PoolEffect, PoolState
from polymorph.compiler.domain.search_state import Announce, Order
from polymorph.config.clock import Clock
from polymorph.events.base import Command, Event
from polymorph.events.types import (
    CandidateEvaluated,
    CandidateProposed,
    EvaluateCandidate,
    SearchClosed,
    SearchOpened,
)
from polymorph.events.values import Value
from polymorph.ledger import messages, searches
from polymorph.ledger.database import Database
from polymorph.ledger.memory import recall, recall_all, remember

OWNER = "compiler"
_POOL = "pool/"
_KNOWLEDGE = "knowledge/"
_log = logging.getLogger(__name__)
V = TypeVar("V", bound=Value)


class LoopRecord:
    """Remembers pools and lessons. `source` is the CloudEvents source that the outbox is relayed under."""

    def __init__(self, database: Database, clock: Clock, *, source: str, hardware: str) -> None:
        self._database = database
        self._clock = clock
        self._source = source
        self._lessons_key = _KNOWLEDGE + hardware
        self._hardware = hardware

    async def pools(self) -> dict[str, PoolState]:
        """Every pool as it was last saved; one that this release cannot read begins anew."""
        documents = await self._database.read(lambda session: recall_all(session, OWNER, _POOL))
        read = {key.removeprefix(_POOL): _read(PoolState, key, d) for key, d in documents.items()}
        return {pool: state for pool, state in read.items() if state is not None}

    async def knowledge(self) -> Knowledge:
        """What was learnt on this hardware."""
        document = await self._database.read(lambda session: recall(session, OWNER, self._lessons_key))
        known = _read(Knowledge, self._lessons_key, document) if document else None
        return known or Knowledge(hardware=self._hardware)

    async def save(
        self,
        state: PoolState,
        known: Knowledge,
        effects: Iterable[PoolEffect],
        verdict: CandidateEvaluated | None = None,
    ) -> None:
        """Keeps the state, the verdict that led to it and what it tells the world. Repeating it changes nothing."""
        now = self._clock.now()
        told = list(effects)

        def work(session: Session) -> list[Event | Command]:
            fresh: list[Event | Command] = []
            if verdict is not None and searches.record_evaluation(session, verdict, now):
                fresh.append(verdict)
            for message in _outgoing(told):
                if _is_new(session, message, now):
                    messages.enqueue(session, message, source=self._source, now=now)
                    fresh.append(message)
            if any(isinstance(effect, Learn) for effect in told):
                remember(session, OWNER, self._lessons_key, known.model_dump(mode="json"), now)
            remember(session, OWNER, _POOL + state.pool, state.model_dump(mode="json"), now)
            return fresh

        for message in await self._database.write(work):
            metrics.saved(message)


def _read(kind: type[V], key: str, document: dict[str, Any]) -> V | None:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        _log.error(
            "what is remembered as %s is no %s of this release, so it begins anew: %s",
            key,
            kind.__name__,
            error,
        )
        return None


def _outgoing(effects: Iterable[PoolEffect]) -> Iterable[Event | Command]:
    for effect in effects:
        if isinstance(effect, Announce):
            yield effect.event
        elif isinstance(effect, Order) and not effect.again:
            yield effect.command


def _is_new(session: Session, message: Event | Command, now: dt.datetime) -> bool:
    """Enters the message into the record of searches, where it belongs there; whether it was not there before."""
    match message:
        case SearchOpened():
            return searches.open_search(session, message, now)
        case CandidateProposed():
            return searches.record_candidate(session, message, now)
        case EvaluateCandidate():
            return searches.order_evaluation(session, message, now)
        case SearchClosed():
            return searches.close_search(session, message, now)
        case _:
            return True
