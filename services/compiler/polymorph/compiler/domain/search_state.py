"""What is remembered of one search, and what it asks the world to do. All of it survives a restart as JSON."""

import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from polymorph.compiler.domain.promotion.moves import Proposal
from polymorph.compiler.domain.search_target import Target
from polymorph.events.base import Event
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate
from polymorph.events.values import Gate, Ratio, Revision, Value, Verdict
from polymorph.kernels.schema import Solution


def identifier(kind: str, *parts: object) -> str:
    """An id that is the same whenever the same thing is meant; fit for a subject."""
    text = "\n".join(str(part) for part in (kind, *parts))
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Phase(StrEnum):
    """How far a search has come."""

    SEARCHING = "searching"
    CONFIRMING = "confirming"
    PROMOTING = "promoting"
    WAITING = "waiting"
    CLOSED = "closed"


class Candidate(Value):
    """A proposal and what the evaluator said about it."""

    candidate_id: str
    solution: str
    name: str
    parent: str | None
    proposer: str
    pattern: str
    params: dict[str, str]
    turn: int
    look: CandidateEvaluated | None = None
    confirmations: tuple[CandidateEvaluated, ...] = ()

    def low(self) -> float | None:
        """The lower bound of its first look's speed-up, where it passed one."""
        if self.look is None or self.look.verdict is not Verdict.PASSED or self.look.speedup is None:
            return None
        return self.look.speedup.low

    def refuted(self) -> bool:
        """Whether confirmations spoke against it: once by failing, or twice by saying nothing."""
        verdicts = [c.verdict for c in self.confirmations]
        return Verdict.FAILED in verdicts or verdicts.count(Verdict.INCONCLUSIVE) > 1


class Pending(Value):
    """An evaluation that was ordered and not answered yet."""

    order: EvaluateCandidate
    sent_at: dt.datetime
    sends: int = 1


class Search(Value):
    """One search, from opened to closed."""

    search_id: str
    pool: str
    hardware: str
    drift_id: str | None
    target: Target
    workload: str
    incumbent: Revision
    opened_at: dt.datetime
    seeds: tuple[dict[str, str], ...] = ()
    avoid: tuple[dict[str, str], ...] = ()
    phase: Phase = Phase.SEARCHING
    turn: int = 0
    candidates: tuple[Candidate, ...] = ()
    pending: tuple[Pending, ...] = ()
    stopped: str = ""
    winner: str | None = None

    def promotion_id(self) -> str | None:
        """The id of the promotion of its winner, the same for ever."""
        return identifier("promotion", self.search_id, self.winner) if self.winner else None

    def candidate(self, candidate_id: str) -> Candidate:
        """Raises KeyError for a candidate of another search."""
        for candidate in self.candidates:
            if candidate.candidate_id == candidate_id:
                return candidate
        raise KeyError(f"search {self.search_id} proposed no candidate {candidate_id}")

    def awaits(self, event: CandidateEvaluated) -> bool:
        """Whether this search ordered the evaluation and has no answer to it."""
        return any(p.order.evaluation_id == event.evaluation_id for p in self.pending)

    def queued(self) -> tuple[Candidate, ...]:
        """Proposed, neither sent nor judged."""
        under_way = {p.order.candidate_id for p in self.pending}
        return tuple(c for c in self.candidates if c.look is None and c.candidate_id not in under_way)

    def cpu_s(self) -> float:
        told = [e for c in self.candidates for e in ((c.look,) if c.look else ()) + c.confirmations]
        return sum(e.cpu_s for e in told)


class Result(Value):
    """What a proposer learns about one of its proposals."""

    solution: str
    params: dict[str, str]
    verdict: Verdict
    gate: Gate
    speedup: Ratio | None
    reason: str


class Proposer(Protocol):
    """An agent: given every result so far, the next proposals; none when it has nothing left to try."""

    def next(self, results: Sequence[Result]) -> list[Solution]: ...


class Proposers(Protocol):
    """Makes the agent of a search, which must propose the same again when it is made anew."""

    def __call__(self, search: Search) -> Proposer: ...


class Answer(StrEnum):
    """What became of a proposal that was handed to the promoter."""

    LIVE = "live"
    UNDER_WAY = "under-way"
    HELD = "held"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Keep:
    """Put these bytes in the object store."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish this fact."""

    event: Event


@dataclass(frozen=True, slots=True)
class Order:
    """Put this work into the queue; `again` where an earlier order of the same evaluation may be lost."""

    command: EvaluateCandidate
    again: bool = False


@dataclass(frozen=True, slots=True)
class Promote:
    """Hand a winner to the promoter; its answer comes back as an input. Idempotent by promotion id."""

    proposal: Proposal


Effect = Keep | Announce | Order | Promote
