"""What earlier searches learnt, so that the next one starts from what is known to work and repeats no failure."""

import math
from collections.abc import Iterable

from polymorph.compiler.domain.agents.proposer import is_beyond_agents
from polymorph.compiler.domain.search_state import Candidate, Search
from polymorph.events.types import CandidateEvaluated
from polymorph.events.values import Gate, Value, Verdict

WINS_KEPT = 64
FAILURES_KEPT = 256


class OperationClass(Value):
    """A definition's name taken apart: operations of one class differ only in their sizes.

    `gemm_n3072_k576_f32` is class `gemm`, dtype `f32`, sizes n 3072 and k 576.
    """

    operation: str
    dtype: str
    sizes: dict[str, int]

    @classmethod
    def of(cls, definition: str) -> "OperationClass":
        *parts, dtype = definition.split("_")
        sizes = {part[0]: int(part[1:]) for part in parts if part[1:].isdigit()}
        return cls(
            operation="_".join(p for p in parts if not p[1:].isdigit()) or definition,
            dtype=dtype,
            sizes=sizes,
        )

    def distance(self, other: "OperationClass") -> float:
        """How far apart the sizes are, in doublings; infinity for another class."""
        same = (self.operation, self.dtype, self.sizes.keys()) == (
            other.operation,
            other.dtype,
            other.sizes.keys(),
        )
        if not same:
            return math.inf
        return sum(abs(math.log2(size / other.sizes[axis])) for axis, size in self.sizes.items())


class Lesson(Value):
    """How one set of parameters did on one operation, range of M and kind of hardware."""

    definition: str
    hardware: str
    min_m: int
    max_m: int
    pattern: str
    params: dict[str, str]
    low: float | None
    high: float | None
    confirmed: bool
    gate: Gate
    reason: str

    def won(self) -> bool:
        """Certainly faster than what it was compared with."""
        return self.low is not None and self.low > 1.0

    def hopeless(self) -> bool:
        """Wrong, unbuildable, or certainly slower: not worth a second look on the same operation."""
        return self.low is None or (self.high is not None and self.high < 1.0)

    def refuted(self, reason: str) -> "Lesson":
        """What remains of a win that was taken back where it served."""
        return self.model_copy(update={"low": None, "high": None, "confirmed": False, "reason": reason})

    def same_thing(self, other: "Lesson") -> bool:
        return (self.definition, self.params, self.min_m, self.max_m) == (
            other.definition,
            other.params,
            other.min_m,
            other.max_m,
        )

    def meets(self, min_m: int, max_m: int) -> bool:
        return self.min_m <= max_m and min_m <= self.max_m


class Knowledge(Value):
    """Lessons of one kind of hardware; what is measured on another is never mixed in."""

    hardware: str
    lessons: tuple[Lesson, ...] = ()

    def learn(self, lessons: Iterable[Lesson]) -> "Knowledge":
        """With further lessons; the best wins and the latest failures are kept. A later failure undoes a win."""
        fresh = tuple(lessons)
        foreign = [lesson.hardware for lesson in fresh if lesson.hardware != self.hardware]
        if foreign:
            raise ValueError(
                f"lessons of {foreign[0]} do not hold on {self.hardware}: keep them under their own hardware"
            )
        failed = [x for x in fresh if x.low is None]
        standing = [x for x in self.lessons if not any(x.same_thing(f) for f in failed)]
        merged = (*standing, *(x for x in fresh if x not in standing))
        wins = sorted((x for x in merged if x.won()), key=lambda x: (not x.confirmed, -(x.low or 0)))
        rest = [x for x in merged if not x.won()]
        return self.model_copy(update={"lessons": (*wins[:WINS_KEPT], *rest[-FAILURES_KEPT:])})

    def seeds(self, definition: str, min_m: int, max_m: int, *, limit: int) -> tuple[dict[str, str], ...]:
        """Parameter sets that won on operations of the same class at these M, the nearest in size first."""
        wanted = OperationClass.of(definition)
        near = [
            (wanted.distance(OperationClass.of(x.definition)), not x.confirmed, -(x.low or 0), x.params)
            for x in self.lessons
            if x.won() and x.meets(min_m, max_m)
        ]
        found: list[dict[str, str]] = []
        for distance, _, _, params in sorted(near, key=lambda item: item[:3]):
            if distance < math.inf and params and params not in found:
                found.append(params)
        return tuple(found[:limit])

    def avoid(self, definition: str, min_m: int, max_m: int) -> tuple[dict[str, str], ...]:
        """Parameter sets not worth a second look on this very operation: wrong ones, and slow ones at the same M."""
        return tuple(
            x.params
            for x in self.lessons
            if x.definition == definition
            and x.params
            and x.hopeless()
            and (x.low is None or (x.min_m, x.max_m) == (min_m, max_m))
        )

    def headroom(self, definition: str, min_m: int, max_m: int) -> float:
        """The part of the operation's time that a better kernel may save.

        What won on operations of the class tells it where there is such; else a guess by M, since few tokens leave a
        kernel waiting for memory, where layouts have most to win. Every look that was in vain on this very operation
        halves it. Where no agent can write for an operation there is nothing to win.
        """
        if is_beyond_agents(definition):
            return 0.0
        wanted = OperationClass.of(definition)
        here = [x for x in self.lessons if x.meets(min_m, max_m)]
        class_wins = [
            x.low or 1.0
            for x in here
            if x.won() and x.confirmed and wanted.distance(OperationClass.of(x.definition)) < math.inf
        ]
        guess = 1 - 1 / max(class_wins) if class_wins else _guess(min_m)
        tried = any(x.definition == definition for x in here)
        return guess / 2 if tried else guess


def lessons(search: Search) -> tuple[Lesson, ...]:
    """What a search taught. A candidate that nobody came to measure is not known to be bad."""
    return tuple(
        _lesson(search, c) for c in search.candidates if c.look is not None and not _unmeasured(c.look)
    )


def _unmeasured(look: CandidateEvaluated) -> bool:
    return look.verdict is Verdict.INCONCLUSIVE and look.speedup is None


def _lesson(search: Search, candidate: Candidate) -> Lesson:
    if candidate.look is None:
        raise ValueError(f"candidate {candidate.candidate_id} was never judged: it teaches nothing")
    last = candidate.confirmations[-1] if candidate.confirmations else candidate.look
    speedup = candidate.look.speedup if last.verdict is not Verdict.FAILED or last.speedup else None
    return Lesson(
        definition=search.target.definition,
        hardware=search.hardware,
        min_m=search.target.min_m,
        max_m=search.target.max_m,
        pattern=candidate.pattern,
        params=candidate.params,
        low=speedup.low if speedup else None,
        high=speedup.high if speedup else None,
        confirmed=candidate.candidate_id == search.winner,
        gate=last.gate,
        reason=last.reason,
    )


def _guess(min_m: int) -> float:
    if min_m <= 8:
        return 0.35
    return 0.2 if min_m <= 64 else 0.1
