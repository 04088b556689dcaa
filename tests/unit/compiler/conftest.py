"""Builders of windows and answers, and an evaluator double that answers from a seeded table."""

import datetime as dt
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest

from polymorph.compiler.domain.knowledge import Knowledge
from polymorph.compiler.domain.search import Budget, SearchMachine
from polymorph.compiler.domain.search_pool import Ended, LoopRules, PoolLoop, PoolState
from polymorph.compiler.domain.search_state import Answer, Order, Promote, Result, Search
from polymorph.compiler.domain.search_target import Target
from polymorph.events.state import EMPTY, DesiredState, Mode
from polymorph.events.types import (
    CandidateEvaluated,
    DriftDetected,
    EvaluateCandidate,
    TrafficShapeObserved,
)
from polymorph.events.values import (
    Gate,
    Numerics,
    Operation,
    Quantiles,
    Ratio,
    Revision,
    TrafficShape,
    Verdict,
)
from polymorph.kernels.schema import Solution, SolutionExtension, SourceFile

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
GATE_UP, DOWN, HEAD = "gemm_n3072_k576_f32", "gemm_n576_k1536_f32", "gemm_n49152_k576_f32"
HARDWARE = "test-cpu"


def flat(value: float) -> Quantiles:
    return Quantiles(mean=value, p10=value, p50=value, p90=value, p99=value)


def shape(tokens_per_step: Mapping[str, float], *, requests: int = 20, prompt: float = 100) -> TrafficShape:
    return TrafficShape(
        requests=requests,
        arrival_rate=1.0,
        burstiness=1.0,
        concurrency=4.0,
        prompt_tokens=flat(prompt),
        output_tokens=flat(50),
        tokens_per_step=dict(tokens_per_step),
    )


def window(
    tokens_per_step: Mapping[str, float],
    operations: Mapping[str, float],
    *,
    number: int = 0,
    pool: str = "chat-1",
    prompt: float = 100,
) -> TrafficShapeObserved:
    return TrafficShapeObserved(
        pool=pool,
        model="chat",
        window_start=START + dt.timedelta(seconds=5 * number),
        window_s=5.0,
        shape=shape(tokens_per_step, prompt=prompt),
        operations=tuple(Operation(definition=name, share=share) for name, share in operations.items()),
        workers=1,
    )


def drift_of(seen: TrafficShapeObserved, tuned_for: TrafficShape | None = None) -> DriftDetected:
    return DriftDetected(
        pool=seen.pool,
        drift_id=f"drift-{seen.window_start:%H%M%S}",
        window_start=seen.window_start,
        distance=1.0,
        threshold=0.5,
        windows=3,
        reason="It differs.",
        tuned_for=tuned_for,
        observed=seen.shape,
    )


def solution(definition: str, name: str, parent: str | None = None) -> Solution:
    return Solution(
        name=name,
        definition=definition,
        author="double",
        spec={},
        sources=(SourceFile(path="kernel.cpp", content=f"// {name}"),),
        x_polymorph=SolutionExtension(
            parent=parent, proposer="double", pattern="blocks", params={"block": name}
        ),
    )


class SeriesProposer:
    """Proposes given batches of names, one batch a round, whatever the results."""

    def __init__(self, definition: str, rounds: Sequence[Sequence[str]]) -> None:
        self._definition = definition
        self._rounds = list(rounds)

    def next(self, results: Sequence[Result]) -> list[Solution]:
        return [solution(self._definition, name) for name in (self._rounds.pop(0) if self._rounds else ())]


def answer(
    order: EvaluateCandidate, ratio: float | None, verdict: Verdict = Verdict.PASSED, *, width: float = 0.01
) -> CandidateEvaluated:
    """What an evaluator says; `ratio` None is a candidate that did not compute what it should."""
    passed = verdict is Verdict.PASSED and ratio is not None
    return CandidateEvaluated(
        pool=order.pool,
        search_id=order.search_id,
        candidate_id=order.candidate_id,
        evaluation_id=order.evaluation_id,
        gate=order.until if ratio is not None else Gate.G2_CORRECT,
        verdict=verdict if ratio is not None else Verdict.FAILED,
        reason="as the table says",
        speedup=Ratio(point=ratio, low=ratio - width, high=ratio + width) if ratio is not None else None,
        numerics=Numerics.REORDERED,
        manifest=f"manifest-{order.candidate_id}" if passed else None,
        artifact=f"artifact-{order.candidate_id}" if passed else None,
        cpu_s=1.5,
    )


class TableEvaluator:
    """A double of the evaluator: a candidate's speed-up is drawn from a seed, its solution and nothing else."""

    def __init__(self, seed: int = 7, table: Mapping[str, float | None] | None = None) -> None:
        self._seed = seed
        self._table = table

    def __call__(self, order: EvaluateCandidate) -> CandidateEvaluated:
        if self._table is not None:
            return answer(order, self._table.get(order.solution, 0.5))
        drawn = random.Random(f"{self._seed} {order.solution}").uniform(0.9, 1.4)
        return answer(order, drawn)


def machine(rounds: Sequence[Sequence[str]], **budget: object) -> SearchMachine:
    def proposers(search: Search) -> SeriesProposer:
        return SeriesProposer(search.target.definition, rounds)

    seeds = iter(range(1, 10_000))
    return SearchMachine(Budget(**budget), proposers, lambda: next(seeds))  # type: ignore[arg-type]


def loop(rounds: Sequence[Sequence[str]], rules: LoopRules | None = None, **budget: object) -> PoolLoop:
    return PoolLoop(rules or LoopRules(hardware=HARDWARE), machine(rounds, **budget))


def search(**changes: object) -> Search:
    target = Target(definition=GATE_UP, min_m=1, max_m=8, share=0.4, span_weight=0.9, gain=0.1)
    return Search(
        search_id="search-1",
        pool="chat-1",
        hardware=HARDWARE,
        drift_id="drift-1",
        target=target,
        workload="w",
        incumbent=EMPTY,
        opened_at=START,
    ).model_copy(update=changes)


class World:
    """Carries out effects against an evaluator and a promoter until nothing is left; states pass through JSON."""

    def __init__(
        self,
        loop: PoolLoop,
        evaluator: Callable[[EvaluateCandidate], CandidateEvaluated],
        mode: Mode = Mode.CANARY,
    ) -> None:
        self.loop = loop
        self.state = PoolState(pool="chat-1", mode=mode)
        self.known = Knowledge(hardware=HARDWARE)
        self.now = START
        self.evaluator = evaluator
        self.promoter_says = Answer.LIVE
        self.events: list[object] = []
        self.orders: list[EvaluateCandidate] = []
        self.promoted: list[str] = []
        self._queue: list[object] = []
        self.on_order: Callable[[], None] = lambda: None

    def told(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def window(self, seen: TrafficShapeObserved, drift: DriftDetected | None = None) -> None:
        self._take(self.loop.window(self.state, seen, drift, self.known, self.now))
        self.run()

    def mode(self, mode: Mode) -> None:
        shown = DesiredState(
            pool="chat-1", generation=self.state.generation, mode=mode, stable=self.state.stable
        )
        self._take(self.loop.desired(self.state, shown, self.known, self.now))
        self.run()

    def tick(self, seconds: float) -> None:
        self.now += dt.timedelta(seconds=seconds)
        self._take(self.loop.tick(self.state, self.known, self.now))
        self.run()

    def run(self) -> None:
        """Nothing else is done while an effect is carried out, but what it leads to comes after it."""
        while self._queue:
            effect = self._queue.pop(0)
            if isinstance(effect, Order):
                self.orders.append(effect.command)
                self.on_order()
                event = self.evaluator(effect.command)
                self._take(self.loop.evaluated(self.state, event, self.known, self.now))
            elif isinstance(effect, Promote):
                self._promote(effect)

    def _promote(self, effect: Promote) -> None:
        proposal = effect.proposal
        live = self.promoter_says is Answer.LIVE
        stable = self.state.stable
        if live:
            self.promoted.append(proposal.promotion_id)
            stable = Revision(
                revision=f"r-{len(self.promoted)}", kernels=(*stable.kernels, *proposal.bindings)
            )
        self.ended(proposal.promotion_id, self.promoter_says, stable)

    def ended(self, promotion_id: str, says: Answer, stable: Revision | None = None) -> None:
        end = Ended(
            promotion_id, says, self.state.generation + 1, stable or self.state.stable, "the promoter's word"
        )
        self._take(self.loop.promoted(self.state, end, self.known, self.now))
        self.run()

    def _take(self, step: tuple[PoolState, list]) -> None:
        state, effects = step
        self.state = PoolState.model_validate_json(state.model_dump_json())
        for effect in effects:
            if hasattr(effect, "event"):
                self.events.append(effect.event)
            if hasattr(effect, "lessons"):
                self.known = self.known.learn(effect.lessons)
        self._queue += effects


@pytest.fixture
def lab() -> SimpleNamespace:
    """Everything above, under one name."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
