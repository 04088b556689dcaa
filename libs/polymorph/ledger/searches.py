"""The record of searches, candidates and evaluations."""

import datetime as dt

from sqlmodel import Session, col, select

from polymorph.events.types import (
    CandidateEvaluated,
    CandidateProposed,
    EvaluateCandidate,
    SearchClosed,
    SearchOpened,
)
from polymorph.ledger.tables import CandidateRow, EvaluationRow, SearchRow


class UnknownRecord(LookupError):
    """A message refers to something that the record does not hold."""


def open_search(session: Session, event: SearchOpened, now: dt.datetime) -> bool:
    """Whether the search is new."""
    if session.get(SearchRow, event.search_id) is not None:
        return False
    session.add(SearchRow(**event.model_dump(), opened_at=now))
    return True


def close_search(session: Session, event: SearchClosed, now: dt.datetime) -> bool:
    """Whether the search was open until now."""
    row = _search(session, event.search_id)
    if row.outcome is not None:
        return False
    row.outcome, row.winner, row.closing_reason = event.outcome, event.winner, event.reason
    row.candidates, row.cpu_s, row.closed_at = event.candidates, event.cpu_s, now
    return True


def record_candidate(session: Session, event: CandidateProposed, now: dt.datetime) -> bool:
    """Whether the candidate is new."""
    if session.get(CandidateRow, event.candidate_id) is not None:
        return False
    _search(session, event.search_id)
    session.add(CandidateRow(**event.model_dump(), proposed_at=now))
    return True


def order_evaluation(session: Session, command: EvaluateCandidate, now: dt.datetime) -> bool:
    """Whether the evaluation was not ordered before."""
    if session.get(EvaluationRow, command.evaluation_id) is not None:
        return False
    _candidate(session, command.candidate_id)
    session.add(
        EvaluationRow(
            evaluation_id=command.evaluation_id,
            candidate_id=command.candidate_id,
            search_id=command.search_id,
            until=command.until,
            ordered_at=now,
        )
    )
    return True


def record_evaluation(session: Session, event: CandidateEvaluated, now: dt.datetime) -> bool:
    """Whether this verdict is new; the first verdict of an evaluation stands."""
    row = session.get(EvaluationRow, event.evaluation_id)
    if row is not None and row.verdict is not None:
        return False
    if row is None:
        _candidate(session, event.candidate_id)
        row = EvaluationRow(
            evaluation_id=event.evaluation_id, candidate_id=event.candidate_id, search_id=event.search_id
        )
        session.add(row)
    row.gate, row.verdict, row.reason = event.gate, event.verdict, event.reason
    row.speedup = event.speedup.model_dump() if event.speedup else None
    row.result = event.model_dump(mode="json")
    row.cpu_s, row.evaluated_at = event.cpu_s, now
    return True


def open_searches(session: Session, pool: str | None) -> list[SearchRow]:
    statement = select(SearchRow).where(col(SearchRow.outcome).is_(None))
    if pool is not None:
        statement = statement.where(SearchRow.pool == pool)
    return list(session.exec(statement.order_by(col(SearchRow.opened_at))))


def candidates(session: Session, search_id: str) -> list[CandidateRow]:
    statement = select(CandidateRow).where(CandidateRow.search_id == search_id)
    return list(
        session.exec(statement.order_by(col(CandidateRow.proposed_at), col(CandidateRow.candidate_id)))
    )


def evaluations(session: Session, search_id: str) -> list[EvaluationRow]:
    statement = select(EvaluationRow).where(EvaluationRow.search_id == search_id)
    return list(
        session.exec(statement.order_by(col(EvaluationRow.ordered_at), col(EvaluationRow.evaluation_id)))
    )


def _search(session: Session, search_id: str) -> SearchRow:
    row = session.get(SearchRow, search_id)
    if row is None:
        raise UnknownRecord(f"search {search_id!r} is not in the record: open it first")
    return row


def _candidate(session: Session, candidate_id: str) -> CandidateRow:
    row = session.get(CandidateRow, candidate_id)
    if row is None:
        raise UnknownRecord(f"candidate {candidate_id!r} is not in the record: record its proposal first")
    return row
