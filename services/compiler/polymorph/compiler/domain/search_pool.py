"""The loop of one pool: windows become drift, drift a plan, the plan one search after the other.

Pure like the search it drives: the state before, an input and the time give the state after and effects.
"""

import datetime as dt
from dataclasses import dataclass
from typing import Any

from polymorph.compiler.domain import knowledge, search_report
from polymorph.compiler.domain.knowledge import Knowledge, Lesson
from polymorph.compiler.domain.search import SearchMachine
from polymorph.compiler.domain.search_state import (
    Announce,
    Answer,
    Effect,
    Keep,
    Phase,
    Search,
    identifier,
)
from polymorph.compiler.domain.search_target import Target, is_bucket, plan
from polymorph.compiler.domain.search_workload import workload
from polymorph.events.state import EMPTY, DesiredState, Mode
from polymorph.events.types import CandidateEvaluated, DriftDetected, SearchOpened, TrafficShapeObserved
from polymorph.events.values import Operation, Revision, StepTime, TrafficShape, Value

SEARCHING_MODES = (Mode.RECOMMEND, Mode.CANARY)


WINNERS_KEPT = 32
SERVED_KEPT = 64


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a promotion, and the stable revision that key-value shows with it."""

    promotion_id: str
    answer: Answer
    generation: int
    stable: Revision
    reason: str


@dataclass(frozen=True, slots=True)
class LoopRules:
    """How much searching a drift pays for."""

    hardware: str
    cooldown_s: float = 60.0
    least_gain: float = 0.005
    searches: int = 6
    largest_m: int = 32
    seeds: int = 3
    candidates: int = 24


class Plan(Value):
    """The searches that one drift asks for."""

    drift_id: str
    window: TrafficShapeObserved
    remaining: tuple[Target, ...]


class Unmet(Value):
    """A drift that no plan has answered yet, with the latest window since."""

    drift: DriftDetected
    window: TrafficShapeObserved

    def operations(self) -> tuple[Operation, ...]:
        """Where the time goes: in the windows that are the drift's evidence, else in the latest."""
        return self.drift.operations or self.window.operations

    def step_time(self) -> StepTime | None:
        """The same by profiled steps."""
        return self.drift.step_time or self.window.step_time

    def answerable(self) -> bool:
        """Whether the engines have told where their time goes; before that there is nothing to choose by."""
        told = bool(self.operations()) and bool(self.drift.observed.tokens_per_step)
        return told and not self.strange()

    def strange(self) -> list[str]:
        """What stands where a bucket of M should, in the words of a worker that is not of this release."""
        by_m = [self.drift.observed.tokens_per_step, *(operation.by_m for operation in self.operations())]
        return sorted({name for named in by_m for name in named if not is_bucket(name)})


class PoolState(Value):
    """All that the loop remembers of a pool."""

    pool: str
    mode: Mode
    generation: int = 0
    stable: Revision = EMPTY
    tuned: dict[str, TrafficShape] = {}
    unmet: Unmet | None = None
    rests_until: dt.datetime | None = None
    plan: Plan | None = None
    search: Search | None = None
    waiting: tuple[Search, ...] = ()
    asks_at: dt.datetime | None = None
    winners: dict[str, Lesson] = {}
    served: tuple[str, ...] = ()
    """Revisions that a worker has loaded and served calls with, the latest last."""

    def having_served(self, revision: str) -> "PoolState":
        if revision in self.served:
            return self
        return self.model_copy(update={"served": (*self.served, revision)[-SERVED_KEPT:]})

    def tuned_for(self) -> TrafficShape | None:
        """The shape that counts as known: that of the plan under way, else that of the stable revision."""
        return self.plan.window.shape if self.plan else self.tuned.get(self.stable.revision)


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember these lessons in the same transaction as the state."""

    lessons: tuple[Lesson, ...]


PoolEffect = Effect | Learn
PoolStep = tuple[PoolState, list[PoolEffect]]


class PoolLoop:
    """Moves a pool on. Holds no state of its own."""

    def __init__(self, rules: LoopRules, machine: SearchMachine) -> None:
        self._rules = rules
        self._machine = machine

    def window(
        self,
        state: PoolState,
        window: TrafficShapeObserved,
        drift: DriftDetected | None,
        known: Knowledge,
        now: dt.datetime,
    ) -> PoolStep:
        """A window of traffic was observed; `drift` is what the detector says of it."""
        unmet = state.unmet
        if drift:
            unmet = Unmet(drift=drift, window=window)
        elif unmet:
            unmet = unmet.model_copy(update={"window": window})
        told: list[PoolEffect] = [Announce(drift)] if drift else []
        return self._next(_with(state, unmet=unmet), told, known, now)

    def evaluated(
        self, state: PoolState, event: CandidateEvaluated, known: Knowledge, now: dt.datetime
    ) -> PoolStep:
        """The evaluator answered."""
        if state.search is None or event.search_id != state.search.search_id:
            return state, []
        search, effects = self._machine.evaluated(state.search, event, now)
        return self._settle(_with(state, search=search), list(effects), known, now)

    def promoted(
        self,
        state: PoolState,
        ended: Ended,
        known: Knowledge,
        now: dt.datetime,
    ) -> PoolStep:
        """The promoter answered, or a promotion ended."""
        state = _shown(state, ended.generation, ended.stable)
        if state.search is not None and state.search.promotion_id() == ended.promotion_id:
            search, effects = self._machine.promoted(state.search, ended.answer, ended.reason)
            return self._settle(_with(state, search=search), list(effects), known, now)
        held = next((s for s in state.waiting if s.promotion_id() == ended.promotion_id), None)
        if held is not None and ended.answer in (Answer.LIVE, Answer.REFUSED):
            search, effects = self._machine.promoted(held, ended.answer, ended.reason)
            others = tuple(s for s in state.waiting if s is not held)
            return _won(_with(state, waiting=others), search), list(effects)
        won = state.winners.get(ended.promotion_id)
        if won is not None and ended.answer is Answer.REFUSED:
            return state, [Learn((won.refuted(ended.reason),))]
        return state, []

    def desired(self, state: PoolState, shown: DesiredState, known: Knowledge, now: dt.datetime) -> PoolStep:
        """The desired state of the pool was read; one older than what is known changes nothing."""
        if shown.generation < state.generation:
            return state, []
        before, state = state.mode, _shown(state, shown.generation, shown.stable)
        if shown.mode is before:
            return state, []
        state = _with(state, mode=shown.mode, rests_until=None, asks_at=None)
        if state.search is None or shown.mode in SEARCHING_MODES:
            return self._next(state, [], known, now)
        reason = f"The pool's mode became {shown.mode}, which searches nothing."
        search, effects = self._machine.cancelled(state.search, reason)
        return self._settle(_with(state, search=search), list(effects), known, now)

    def tick(self, state: PoolState, known: Knowledge, now: dt.datetime) -> PoolStep:
        """Time passed."""
        if state.search is None:
            return self._next(state, [], known, now)
        search, effects = self._machine.tick(state.search, now)
        return self._settle(_with(state, search=search), list(effects), known, now)

    def resume(self, state: PoolState) -> list[PoolEffect]:
        """What a process that starts again owes the world."""
        return list(self._machine.resume(state.search)) if state.search else []

    def _settle(
        self, state: PoolState, effects: list[PoolEffect], known: Knowledge, now: dt.datetime
    ) -> PoolStep:
        """After the search moved: goes on with the plan where it has ended or waits for approval."""
        search = state.search
        if search is None or search.phase not in (Phase.CLOSED, Phase.WAITING):
            return state, effects
        taught = knowledge.lessons(search)
        state = _won(state, search)
        if search.phase is Phase.WAITING:
            later = now + dt.timedelta(seconds=self._rules.cooldown_s)
            state = _with(state, waiting=(*state.waiting, search), asks_at=later)
        return self._next(_with(state, search=None), [*effects, Learn(taught)], known.learn(taught), now)

    def _next(
        self, state: PoolState, effects: list[PoolEffect], known: Knowledge, now: dt.datetime
    ) -> PoolStep:
        """The next thing to do, if any, when no search runs. A drift since the plan was made ends the plan."""
        if state.search is not None:
            return state, effects
        if state.waiting and state.mode is Mode.CANARY and (state.asks_at is None or now >= state.asks_at):
            search, more = self._machine.asked_again(state.waiting[0])
            return _with(state, search=search, waiting=state.waiting[1:]), [*effects, *more]
        going_on = state.mode in SEARCHING_MODES and state.unmet is None
        if state.plan and state.plan.remaining and going_on:
            return self._begin(state, state.plan, effects, known, now)
        if state.plan:
            state = self._finished(state, state.plan, now)
        if state.unmet and self._may_open(state, state.unmet, now):
            return self._open(state, state.unmet, effects, known, now)
        return state, effects

    def _may_open(self, state: PoolState, unmet: Unmet, now: dt.datetime) -> bool:
        rested = state.rests_until is None or now >= state.rests_until
        return state.mode in SEARCHING_MODES and rested and unmet.answerable()

    def _open(
        self, state: PoolState, unmet: Unmet, effects: list[PoolEffect], known: Knowledge, now: dt.datetime
    ) -> PoolStep:
        """Plans the searches that a drift pays for; where none does, the shape counts as known."""
        observed = {
            "shape": unmet.drift.observed,
            "operations": unmet.operations(),
            "step_time": unmet.step_time(),
        }
        window = unmet.window.model_copy(update=observed)
        targets = plan(
            window,
            known.headroom,
            least_gain=self._rules.least_gain,
            limit=self._rules.searches,
            largest_m=self._rules.largest_m,
        )
        under_way = Plan(drift_id=unmet.drift.drift_id, window=window, remaining=targets)
        return self._next(_with(state, plan=under_way, unmet=None), effects, known, now)

    def _finished(self, state: PoolState, done: Plan, now: dt.datetime) -> PoolState:
        """The stable revision is tuned for the plan's shape. Only a plan that was carried out earns a rest."""
        rest = now + dt.timedelta(seconds=self._rules.cooldown_s) if state.unmet is None else None
        tuned = {**state.tuned, state.stable.revision: done.window.shape}
        return _with(state, plan=None, tuned=tuned, rests_until=rest)

    def _begin(
        self, state: PoolState, under_way: Plan, effects: list[PoolEffect], known: Knowledge, now: dt.datetime
    ) -> PoolStep:
        """Opens the first search of what remains."""
        target, *rest = under_way.remaining
        search_id = identifier("search", under_way.drift_id, target.definition, target.min_m, target.max_m)
        document = workload(search_id, target, under_way.window)
        search = Search(
            search_id=search_id,
            pool=state.pool,
            hardware=self._rules.hardware,
            drift_id=under_way.drift_id,
            target=target,
            workload=document.digest(),
            incumbent=state.stable,
            opened_at=now,
            seeds=known.seeds(target.definition, target.min_m, target.max_m, limit=self._rules.seeds),
            avoid=known.avoid(target.definition, target.min_m, target.max_m),
        )
        search, more = self._machine.begin(search, now)
        state = _with(state, search=search, plan=under_way.model_copy(update={"remaining": tuple(rest)}))
        told: list[PoolEffect] = [Keep(document.canonical()), Announce(self._opened(search)), *more]
        return self._settle(state, [*effects, *told], known, now)

    def _opened(self, search: Search) -> SearchOpened:
        target = search.target
        return SearchOpened(
            pool=search.pool,
            search_id=search.search_id,
            drift_id=search.drift_id,
            definition=target.definition,
            min_m=target.min_m,
            max_m=target.max_m,
            share=target.share,
            budget_candidates=self._rules.candidates,
            hardware=search.hardware,
            reason=search_report.opened(target, self._rules.candidates, len(search.seeds)),
        )


def _shown(state: PoolState, generation: int, stable: Revision) -> PoolState:
    """With what key-value shows, unless something newer is known."""
    return _with(state, generation=generation, stable=stable) if generation >= state.generation else state


def _won(state: PoolState, search: Search) -> PoolState:
    """Remembers what a promoted winner was, in case it is taken back."""
    promotion_id = search.promotion_id()
    if search.phase is not Phase.CLOSED or promotion_id is None:
        return state
    won = next((x for x in knowledge.lessons(search) if x.confirmed), None)
    winners = {**state.winners, promotion_id: won} if won else state.winners
    return _with(state, winners=dict(list(winners.items())[-WINNERS_KEPT:]))


def _with(state: PoolState, **changes: Any) -> PoolState:
    return state.model_copy(update=changes)
