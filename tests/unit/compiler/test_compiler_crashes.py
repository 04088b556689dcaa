"""The compiler dies at every point where it touches the world, starts again, and promotes exactly once."""

import asyncio

import pytest

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import Consumption
from polymorph.compiler.app import Compiler
from polymorph.compiler.settings import CompilerSettings
from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import (
    CandidateProposed,
    EvaluateCandidate,
    PromotionCompleted,
    SearchClosed,
    SearchOpened,
)
from polymorph.kernels.signing import Signer
from polymorph.ledger.memory import remember
from polymorph.ledger.tables import OutboxRow
from polymorph.simulator.bus import FaultyBus
from polymorph.simulator.clock import SimulatedClock
from polymorph.simulator.database import SimulatedDatabase
from polymorph.simulator.faults import CrashAt, Crashed
from polymorph.simulator.journal import Journal
from polymorph.simulator.loop import run_simulated

SOURCE = "/polymorph/compiler/test"
TABLE = {"a": 1.1, "b": 1.3, "c": 1.2, "d": None}


class Death(CrashAt):
    """At its point the process stands still, and is ended from outside: no handler of it sees an error."""

    def __init__(self, number):
        super().__init__(number)
        self.died = asyncio.Event()

    async def pause(self, point):
        try:
            await super().pause(point)
        except Crashed:
            self.died.set()
            await asyncio.Event().wait()


class Run:
    """One life of a pool: windows come, an evaluator double answers by the table, the compiler dies once."""

    def __init__(self, lab, signer, crash_at):
        self.lab = lab
        self.signer = signer
        self.clock = SimulatedClock()
        self.world = MemoryWorld()
        self.outside = InMemoryBus("/polymorph/test", self.clock, self.world)
        self.faults = Death(crash_at)
        self.journal = Journal()
        self.database = SimulatedDatabase(self.faults.pause)
        self.evaluations: list[EvaluateCandidate] = []
        self.lives = 0
        self.names = {lab.solution(lab.GATE_UP, name).digest(): name for name in TABLE}

    def told(self, kind):
        return [event for event in self.journal.told if isinstance(event, kind)]

    async def go(self):
        others = [asyncio.ensure_future(work) for work in (self._windows(), self._evaluator(), self._live())]
        try:
            await self._until_promoted()
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        return self

    async def _until_promoted(self):
        while not self.told(SearchClosed):
            await self.clock.sleep(0.2)
            if self.clock.monotonic() > 600:
                raise AssertionError(f"no end after {self.faults.points[-3:]}")
        await self.clock.sleep(3)

    async def _live(self):
        settings = CompilerSettings(
            default_mode=Mode.CANARY,
            min_requests=10,
            drift_windows=2,
            evaluation_timeout_s=20,
            cooldown_s=300,
        )
        while True:
            self.lives += 1
            bus = FaultyBus(InMemoryBus(SOURCE, self.clock, self.world), self.faults, self.journal)
            compiler = Compiler(
                settings,
                bus,
                self.clock,
                self.database,
                source=SOURCE,
                hardware=self.lab.HARDWARE,
                signer=self.signer,
                proposers=lambda search: self.lab.SeriesProposer(
                    search.target.definition, [["a", "b"], ["c", "d"]]
                ),
            )
            running = asyncio.ensure_future(compiler.run(asyncio.Event()))
            died = asyncio.ensure_future(self.faults.died.wait())
            try:
                await asyncio.wait({running, died}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
            finally:
                running.cancel()
                died.cancel()
                await asyncio.gather(running, died, return_exceptions=True)
                await bus.close()
            self.faults.died.clear()
            await self.clock.sleep(1)

    async def _windows(self):
        number = 0
        while True:
            await self.clock.sleep(1)
            seen = self.lab.window({"8": 1.0}, {self.lab.GATE_UP: 0.4}, number=number)
            await self.outside.publish(seen.model_copy(update={"window_start": self.clock.now()}))
            number += 1

    async def _evaluator(self):
        async def evaluate(delivery):
            order = delivery.message
            self.evaluations.append(order)
            await self.clock.sleep(0.05)
            await self.outside.publish(self.lab.answer(order, TABLE[self.names[order.solution]]))

        await self.outside.consume(
            Consumption(durable="evaluator", subject=EvaluateCandidate.wildcard()), evaluate
        )


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    return Signer.generate(tmp_path_factory.mktemp("keys") / "promoter.key")


async def shown(run):
    entry = await run.outside.kv_get("desired", "chat-1")
    return DesiredState.model_validate_json(entry.value)


def checked(run, desired):
    """What must hold, wherever the compiler died."""
    assert len({e.promotion_id for e in run.told(PromotionCompleted)}) == 1
    assert len(run.told(PromotionCompleted)) == 1
    assert [e.outcome for e in run.told(SearchClosed)] == ["promoted"]
    assert len({e.search_id for e in run.told(SearchOpened)}) == 1
    assert desired.generation == run.told(PromotionCompleted)[0].generation
    assert desired.stable == run.told(PromotionCompleted)[0].revision
    winner = next(
        e for e in run.told(CandidateProposed) if e.candidate_id == run.told(SearchClosed)[0].winner
    )
    assert winner.params == {"block": "b"}
    assert desired.stable.kernels[0].artifact == f"artifact-{winner.candidate_id}"
    # Nothing was evaluated twice under two names: four looks and one confirmation.
    assert len({o.evaluation_id for o in run.evaluations}) == 5


def simulate(lab, signer, crash_at):
    async def main():
        run = await Run(lab, signer, crash_at).go()
        return run, await shown(run)

    return run_simulated(main())


def test_it_promotes_once_where_nothing_goes_wrong(lab, signer):
    run, desired = simulate(lab, signer, None)
    checked(run, desired)
    assert (run.lives, desired.generation) == (1, 1)


def test_what_cannot_be_read_keeps_no_other_pool_from_being_tuned(lab, signer):
    """Poison in the outbox, in what is remembered, in desired states, a freeze and a quarantine of others."""

    def poison(session):
        now = lab.START
        row = {"message_id": "z", "type": "polymorph.evt.future.thing.v2", "data": {}, "created_at": now}
        session.add(OutboxRow(**row))
        for key in ("pool/other", f"knowledge/{lab.HARDWARE}"):
            remember(session, "compiler", key, {"of": "another release"}, now)

    async def main():
        run = Run(lab, signer, None)
        await run.database.write(poison)
        for bucket in ("desired", "freeze", "quarantine"):
            await run.outside.kv_put(bucket, "another", b"until monday")
        await run.go()
        return run, await shown(run)

    run, desired = run_simulated(main())
    checked(run, desired)
    assert run.lives == 1


def test_it_promotes_once_wherever_it_dies(lab, signer):
    calm, _ = simulate(lab, signer, None)
    points = list(calm.faults.points)
    # Dying before a read or a write is dying after the effect before it: the points after effects are all there is.
    effects = [
        n
        for n, point in enumerate(points)
        if point.endswith("after") or point in ("put object", "deliver before")
    ]
    died = 0
    for number in effects[::2]:
        try:
            run, desired = simulate(lab, signer, number)
            checked(run, desired)
            died += run.lives == 2
        except AssertionError as error:
            message = f"crash at point {number} of {len(points)}, {points[number]}: {error}"
            raise AssertionError(message) from error
    assert died > 20
