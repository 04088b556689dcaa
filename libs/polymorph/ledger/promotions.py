"""The record of promotions: generations, intents, and what became of them.

Key-value holds the truth about a pool. A step is written here before it may be committed there, so every generation
that key-value ever shows is known, with the generation that it was planned on: its line of ancestors tells which
intents were committed and which never can be.
"""

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import bindparam, or_
from sqlmodel import Session, col, select

from polymorph.events.base import Event
from polymorph.events.state import DesiredState
from polymorph.events.values import Revision
from polymorph.ledger import messages
from polymorph.ledger.insertion import insert_once
from polymorph.ledger.tables import PoolRow, PromotionRow, RevisionRow, StepRow, StepStatus


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One change of a desired state, ready to be written as an intent.

    `phases` maps a promotion id to its phase once key-value shows `target`; `events` are published then.
    """

    action: str
    base_generation: int
    target: DesiredState
    promotion_id: str | None
    reason: str
    events: tuple[Event, ...] = ()
    phases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """How an intent ends that key-value never showed; `phase` is for a promotion that it would have begun."""

    status: StepStatus
    phase: str
    reason: str


_LOCK = {"key_share": True}
"""FOR NO KEY UPDATE: rows that only refer to the locked one do not wait for it."""
_OPEN = (
    select(StepRow)
    .where(
        StepRow.pool == bindparam("pool"),
        or_(col(StepRow.status) == StepStatus.INTENT, col(StepRow.generation) == bindparam("shown")),
    )
    .order_by(col(StepRow.generation))
    .with_for_update(key_share=True)
)
OUTRUN = GivenUp(StepStatus.SUPERSEDED, "superseded", "another change of the pool came first")
INTENT_PHASE = "intent"
HELD_PHASE = "held"


@dataclass(frozen=True, slots=True)
class Proposed:
    """A promotion as it enters the record."""

    promotion_id: str
    pool: str
    revision: str
    phase: str
    reason: str
    drift_id: str | None
    proposal: dict[str, Any]


def add_pool(session: Session, pool: str, now: dt.datetime) -> None:
    insert_once(session, PoolRow, pool=pool, generation=0, created_at=now)


def put_promotion(session: Session, proposed: Proposed, now: dt.datetime) -> bool:
    """Enters a promotion into the record, or puts a held one anew. False where it has gone further already."""
    add_pool(session, proposed.pool, now)
    if insert_once(session, PromotionRow, **asdict(proposed), created_at=now, updated_at=now):
        return True
    row = session.get(PromotionRow, proposed.promotion_id, with_for_update=_LOCK)
    if row is None or row.phase != HELD_PHASE:
        return False
    if (row.phase, row.reason) == (proposed.phase, proposed.reason):
        return True
    row.phase, row.reason, row.updated_at = proposed.phase, proposed.reason, now
    row.revision, row.proposal = proposed.revision, proposed.proposal
    session.flush()
    return True


def open_step(
    session: Session, pool: str, base_generation: int, plan: Callable[[int], StepPlan], now: dt.datetime
) -> StepRow:
    """Allocates the next generation of `pool` and keeps the step planned for it, in this transaction.

    Two callers never get the same generation, and a generation is never given out again.
    """
    add_pool(session, pool, now)
    row = session.exec(select(PoolRow).where(PoolRow.pool == pool).with_for_update(key_share=True)).one()
    row.generation = max(row.generation, base_generation) + 1
    step = plan(row.generation)
    kept = StepRow(
        pool=pool,
        generation=row.generation,
        base_generation=base_generation,
        promotion_id=step.promotion_id,
        action=step.action,
        status=StepStatus.INTENT,
        reason=step.reason,
        target=step.target.model_dump(mode="json", exclude={"signature"}),
        messages=[messages.encode(event) for event in step.events],
        phases=dict(step.phases),
        created_at=now,
    )
    session.add(kept)
    session.flush()
    return kept


def settle(session: Session, pool: str, shown: int, *, source: str, now: dt.datetime) -> list[StepRow]:
    """Makes the record agree with key-value, which shows generation `shown` of `pool`; returns newly confirmed steps.

    Confirms `shown` and its ancestors, even those given up before: what key-value showed was promoted. Older intents
    outside that line can never be committed any more. Idempotent.
    """
    open_steps = session.exec(_OPEN, params={"pool": pool, "shown": shown}).all()
    line = _unconfirmed_line(session, [step for step in open_steps if step.generation == shown])
    for step in line:
        _confirm(session, step, source=source, now=now)
    for step in open_steps:
        if step.status == StepStatus.INTENT and step.generation < shown:
            give_up(session, step, OUTRUN, now)
    return line


def give_up(session: Session, step: StepRow, end: GivenUp, now: dt.datetime) -> None:
    """Closes an intent that was not committed; a promotion that it would have begun ends with it."""
    step.status, step.reason, step.settled_at = end.status, end.reason, now
    row = session.get(PromotionRow, step.promotion_id) if step.promotion_id else None
    if row is not None and row.phase == INTENT_PHASE:
        row.phase, row.reason, row.updated_at = end.phase, end.reason, now


def abort_step(session: Session, pool: str, generation: int, end: GivenUp, now: dt.datetime) -> bool:
    """Whether the step was still an intent and is now closed."""
    step = session.get(StepRow, (pool, generation), with_for_update=_LOCK)
    if step is None or step.status != StepStatus.INTENT:
        return False
    give_up(session, step, end, now)
    return True


def intents(session: Session, pool: str | None) -> list[StepRow]:
    """Steps whose end is not in the record yet, oldest first."""
    statement = select(StepRow).where(StepRow.status == StepStatus.INTENT)
    if pool is not None:
        statement = statement.where(StepRow.pool == pool)
    return list(session.exec(statement.order_by(col(StepRow.pool), col(StepRow.generation))))


def last_confirmed(session: Session, pool: str) -> StepRow | None:
    """The newest step of `pool` that key-value is known to have shown."""
    statement = select(StepRow).where(StepRow.pool == pool, StepRow.status == StepStatus.CONFIRMED)
    return session.exec(statement.order_by(col(StepRow.generation).desc()).limit(1)).first()


def promotions(session: Session, pool: str | None, phases: frozenset[str] | None) -> list[PromotionRow]:
    """Promotions, newest first."""
    statement = select(PromotionRow)
    if pool is not None:
        statement = statement.where(PromotionRow.pool == pool)
    if phases is not None:
        statement = statement.where(col(PromotionRow.phase).in_(sorted(phases)))
    ordered = statement.order_by(col(PromotionRow.created_at).desc(), col(PromotionRow.promotion_id))
    return list(session.exec(ordered))


def pools(session: Session) -> list[str]:
    return list(session.exec(select(PoolRow.pool).order_by(col(PoolRow.pool))))


def revision(session: Session, pool: str, name: str) -> Revision | None:
    row = session.get(RevisionRow, (pool, name))
    return None if row is None else Revision.model_validate(row.content)


def _unconfirmed_line(session: Session, shown: list[StepRow]) -> list[StepRow]:
    """The shown step and its ancestors up to one that is confirmed, oldest first."""
    line: list[StepRow] = []
    step = shown[0] if shown else None
    while step is not None and step.status != StepStatus.CONFIRMED:
        line.append(step)
        step = session.get(StepRow, (step.pool, step.base_generation), with_for_update=_LOCK)
    return line[::-1]


def _confirm(session: Session, step: StepRow, *, source: str, now: dt.datetime) -> None:
    step.status, step.settled_at = StepStatus.CONFIRMED, now
    target = DesiredState.model_validate(step.target)
    for content in (target.stable, target.candidate):
        if content is not None:
            _keep_revision(session, step.pool, content, now)
    for promotion_id, phase in step.phases.items():
        # A record made anew under a living pool does not know the promotion that it ends.
        row = session.get(PromotionRow, promotion_id)
        if row is not None:
            row.phase, row.reason, row.updated_at = phase, step.reason, now
    for message in step.messages:
        fact = messages.decode(message["type"], message["data"])
        messages.enqueue(session, fact, source=source, now=now)


def _keep_revision(session: Session, pool: str, content: Revision, now: dt.datetime) -> None:
    insert_once(
        session,
        RevisionRow,
        pool=pool,
        revision=content.revision,
        parent=content.parent,
        content=content.model_dump(mode="json"),
        created_at=now,
    )
