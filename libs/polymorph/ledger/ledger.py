"""The ledger: every method is one transaction, and what it tells the world stands in the outbox of the same one."""

import datetime as dt
from collections.abc import Callable
from typing import TypeVar

from sqlmodel import Session

from polymorph.config.clock import Clock
from polymorph.events.types import (
    CandidateEvaluated,
    CandidateProposed,
    EvaluateCandidate,
    SearchClosed,
    SearchOpened,
)
from polymorph.events.values import Revision
from polymorph.ledger import messages, promotions, searches
from polymorph.ledger.database import Database
from polymorph.ledger.tables import (
    CandidateRow,
    EvaluationRow,
    PromotionRow,
    SearchRow,
    StepRow,
)

T = TypeVar("T")
M = TypeVar("M", SearchOpened, SearchClosed, CandidateProposed, EvaluateCandidate)


class Ledger:
    """The truth about searches and promotions.

    `source` is the CloudEvents source of the service that writes; it must be the source of the bus that the outbox is
    relayed to, since message ids are made of it. Every method may be repeated after a crash: the second time changes
    nothing and tells nothing.
    """

    def __init__(self, database: Database, clock: Clock, *, source: str) -> None:
        self.database = database
        self._clock = clock
        self._source = source

    # --- searches ---

    async def open_search(self, event: SearchOpened) -> bool:
        """Whether it is new; publishes `event` then."""
        return await self._tell(event, searches.open_search)

    async def close_search(self, event: SearchClosed) -> bool:
        """Whether it was open; publishes `event` then. Raises `UnknownRecord`."""
        return await self._tell(event, searches.close_search)

    async def record_candidate(self, event: CandidateProposed) -> bool:
        """Whether it is new; publishes `event` then. Raises `UnknownRecord`."""
        return await self._tell(event, searches.record_candidate)

    async def order_evaluation(self, command: EvaluateCandidate) -> bool:
        """Whether it is new; sends `command` then. Raises `UnknownRecord`."""
        return await self._tell(command, searches.order_evaluation)

    async def record_evaluation(self, event: CandidateEvaluated, *, message_id: str | None = None) -> bool:
        """Keeps a verdict that the evaluator published; whether it is new. Raises `UnknownRecord`.

        `message_id` is the id of the envelope it came in.
        """
        now = self._clock.now()

        def work(session: Session) -> bool:
            if message_id and not messages.first_time(session, "evaluations", message_id, now):
                return False
            return searches.record_evaluation(session, event, now)

        return await self.database.write(work)

    async def open_searches(self, pool: str | None = None) -> list[SearchRow]:
        return await self.database.read(lambda session: searches.open_searches(session, pool))

    async def search(self, search_id: str) -> SearchRow | None:
        return await self.database.read(lambda session: session.get(SearchRow, search_id))

    async def candidates(self, search_id: str) -> list[CandidateRow]:
        return await self.database.read(lambda session: searches.candidates(session, search_id))

    async def evaluations(self, search_id: str) -> list[EvaluationRow]:
        return await self.database.read(lambda session: searches.evaluations(session, search_id))

    # --- promotions ---

    async def put_promotion(self, proposed: promotions.Proposed) -> bool:
        """Enters a promotion that does not begin now, or puts a held one anew; False where it went further."""
        return await self._write(lambda s, now: promotions.put_promotion(s, proposed, now))

    async def open_step(
        self,
        pool: str,
        base_generation: int,
        plan: Callable[[int], promotions.StepPlan],
        *,
        proposed: promotions.Proposed | None = None,
    ) -> StepRow | None:
        """Allocates a generation and keeps the intent, with the promotion that it begins.

        `plan` is pure and gets the generation. None where somebody else has begun that promotion.
        """

        def work(session: Session, now: dt.datetime) -> StepRow | None:
            if proposed is not None and not promotions.put_promotion(session, proposed, now):
                return None
            return promotions.open_step(session, pool, base_generation, plan, now)

        return await self._write(work)

    async def settle(self, pool: str, shown: int) -> list[StepRow]:
        """Confirms what key-value shows, publishes its events, closes what lost; returns the steps confirmed now."""
        return await self._write(
            lambda s, now: promotions.settle(s, pool, shown, source=self._source, now=now)
        )

    async def abort_step(self, pool: str, generation: int, end: promotions.GivenUp) -> bool:
        """Whether it was still an intent."""
        return await self._write(lambda s, now: promotions.abort_step(s, pool, generation, end, now))

    async def step(self, pool: str, generation: int) -> StepRow | None:
        return await self.database.read(lambda s: s.get(StepRow, (pool, generation)))

    async def intents(self, pool: str | None = None) -> list[StepRow]:
        return await self.database.read(lambda s: promotions.intents(s, pool))

    async def last_confirmed(self, pool: str) -> StepRow | None:
        return await self.database.read(lambda s: promotions.last_confirmed(s, pool))

    async def promotion(self, promotion_id: str) -> PromotionRow | None:
        return await self.database.read(lambda s: s.get(PromotionRow, promotion_id))

    async def promotions(
        self, pool: str | None = None, phases: frozenset[str] | None = None
    ) -> list[PromotionRow]:
        return await self.database.read(lambda s: promotions.promotions(s, pool, phases))

    async def revision(self, pool: str, name: str) -> Revision | None:
        return await self.database.read(lambda s: promotions.revision(s, pool, name))

    async def pools(self) -> list[str]:
        return await self.database.read(promotions.pools)

    # --- messages ---

    async def once(self, consumer: str, message_id: str, effect: Callable[[Session], None]) -> bool:
        """Runs `effect` unless `consumer` had this message before; both are kept together. Whether it ran."""

        def work(session: Session, now: dt.datetime) -> bool:
            if not messages.first_time(session, consumer, message_id, now):
                return False
            effect(session)
            return True

        return await self._write(work)

    async def _write(self, work: Callable[[Session, dt.datetime], T]) -> T:
        now = self._clock.now()
        return await self.database.write(lambda session: work(session, now))

    async def _tell(self, message: M, change: Callable[[Session, M, dt.datetime], bool]) -> bool:
        def work(session: Session, now: dt.datetime) -> bool:
            if not change(session, message, now):
                return False
            messages.enqueue(session, message, source=self._source, now=now)
            return True

        return await self._write(work)
