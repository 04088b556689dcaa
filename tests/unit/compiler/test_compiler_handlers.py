"""What the handlers promise: saved before promised, owed until paid, deaf to what is stale; and memory that lasts."""

import datetime as dt

import pytest
from prometheus_client import REGISTRY

from polymorph.bus.errors import Retryable, Unavailable
from polymorph.compiler.adapters.record import LoopRecord
from polymorph.compiler.domain.search_pool import Ended
from polymorph.compiler.domain.search_state import Answer
from polymorph.compiler.handlers import Tuning
from polymorph.events.state import EMPTY, DesiredState, Mode
from polymorph.events.types import (
    PromotionCompleted,
    PromotionRolledBack,
    WorkerKernelFaulted,
    WorkerLoaded,
    WorkerRefused,
)
from polymorph.ledger import messages, searches
from polymorph.ledger.database import DatabaseUnavailable
from polymorph.simulator.database import SimulatedDatabase
from polymorph.simulator.faults import CrashAt
from polymorph.traffic.drift import DriftDetector, DriftRules


class HandClock:
    """Stands still until it is moved."""

    def __init__(self, start):
        self.at = start

    def now(self):
        return self.at

    def monotonic(self):
        return self.at.timestamp()

    async def sleep(self, seconds):
        self.at += dt.timedelta(seconds=seconds)


class FloorDouble:
    """A world that does what it is told, or is away."""

    def __init__(self):
        self.away = False
        self.kept = []
        self.again = []
        self.proposals = []
        self.taken_back = []
        self.quarantined = []

    def _check(self):
        if self.away:
            raise Unavailable("nobody answers")

    async def keep(self, data):
        self._check()
        self.kept.append(data)

    async def order_again(self, command):
        self._check()
        self.again.append(command)

    async def pool(self, pool):
        self._check()
        return DesiredState(pool=pool, generation=0, mode=Mode.CANARY)

    async def promote(self, proposal):
        self._check()
        self.proposals.append(proposal)
        stable = DesiredState(pool=proposal.pool, generation=1).stable
        return Ended(proposal.promotion_id, Answer.LIVE, 1, stable, "done")

    async def take_back(self, pool, generation, reason):
        self.taken_back.append((pool, generation, reason))

    async def quarantine(self, artifact, reason):
        self._check()
        self.quarantined.append((artifact, reason))


class DriftOnce:
    """A detector double: the first window of a process that was not tuned for is a drift."""

    def __init__(self, lab):
        self._lab = lab

    def observe(self, window, tuned_for):
        return None if tuned_for else self._lab.drift_of(window)


class Setting:
    def __init__(self, lab, database=None, detector=None):
        self.lab = lab
        self.clock = HandClock(lab.START)
        self.database = database or SimulatedDatabase(CrashAt().pause)
        self.floor = FloorDouble()
        self.record = LoopRecord(self.database, self.clock, source="/t", hardware=lab.HARDWARE)
        self.tuning = Tuning(
            lab.loop([["a", "b"]], answer_s=100),
            self.record,
            self.floor,
            self.clock,
            detector=detector or (lambda: DriftOnce(lab)),
            window_age_s=120,
            hardware=lab.HARDWARE,
        )

    def seen(self):
        window = self.lab.window({"8": 1.0}, {self.lab.GATE_UP: 0.4})
        return window.model_copy(update={"window_start": self.clock.now()})

    def outbox(self):
        rows = self.database.peek(lambda session: messages.pending(session, 100))
        return [messages.decode(row.type, row.data) for row in rows]

    def orders(self):
        return [m for m in self.outbox() if type(m).__name__ == "EvaluateCandidate"]

    async def answer_all(self, ratio=1.2):
        answered = set()
        while waiting := [o for o in self.orders() if o.evaluation_id not in answered]:
            for order in waiting:
                answered.add(order.evaluation_id)
                await self.tuning.evaluated(self.lab.answer(order, ratio))


@pytest.fixture
def setting(lab):
    return Setting(lab)


async def test_a_stale_window_says_nothing_about_now(setting):
    old = setting.seen()
    setting.clock.at += dt.timedelta(seconds=300)
    await setting.tuning.window(old)
    assert setting.outbox() == []


async def test_nothing_is_told_while_objects_cannot_be_kept(setting):
    setting.floor.away = True
    with pytest.raises(Unavailable):
        await setting.tuning.window(setting.seen())
    assert setting.outbox() == []
    setting.floor.away = False
    await setting.tuning.window(setting.seen())
    assert setting.orders()


class BusyOnce(SimulatedDatabase):
    """Somebody else holds the database for one write."""

    busy = False

    async def write(self, work):
        if self.busy:
            self.busy = False
            raise DatabaseUnavailable("locked")
        return await super().write(work)


async def test_a_drift_is_told_once_though_its_first_save_failed(lab):
    setting = Setting(
        lab, BusyOnce(CrashAt().pause), detector=lambda: DriftDetector(DriftRules(consecutive=3))
    )
    for number in range(5):
        seen = setting.seen()
        setting.database.busy = number == 2
        if setting.database.busy:
            with pytest.raises(DatabaseUnavailable):
                await setting.tuning.window(seen)
        await setting.tuning.window(seen)
        setting.clock.at += dt.timedelta(seconds=5)
    drifts = [m for m in setting.outbox() if type(m).__name__ == "DriftDetected"]
    assert [drift.windows for drift in drifts] == [3]


async def test_verdicts_stand_in_the_record_with_the_search(setting):
    await setting.tuning.window(setting.seen())
    await setting.answer_all()
    rows = setting.database.peek(lambda session: searches.evaluations(session, setting.orders()[0].search_id))
    assert {row.verdict for row in rows} == {"passed"}
    assert len(rows) == 3


def counted(pool):
    """Every counter of the compiler that counts for `pool`, by name and labels."""
    return {
        (
            sample.name.removeprefix("polymorph_compiler_"),
            *sorted(v for k, v in sample.labels.items() if k != "pool"),
        ): (sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("polymorph_compiler_")
        and sample.name.endswith("_total")
        and sample.labels["pool"] == pool
    }


async def test_what_the_loop_did_is_counted_once_though_its_drift_was_saved_at_the_second_try(lab):
    setting = Setting(lab, BusyOnce(CrashAt().pause))
    seen = setting.seen().model_copy(update={"pool": "counted"})
    setting.database.busy = True
    with pytest.raises(DatabaseUnavailable):
        await setting.tuning.window(seen)
    assert counted("counted") == {}
    await setting.tuning.window(seen)
    assert counted("counted") == {("drifts_detected_total",): 1, ("searches_opened_total",): 1}
    await setting.answer_all()
    evaluated = {key: value for key, value in counted("counted").items() if key[0].startswith("candidates")}
    assert {key[2] for key in evaluated} == {"passed"}
    assert sum(evaluated.values()) == len(setting.orders()) == 3
    assert counted("counted")["searches_closed_total", "promoted"] == 1


async def test_promotions_are_counted_as_their_events_come_back(setting):
    told = {"pool": "told", "promotion_id": "x", "generation": 1, "revision": EMPTY, "reason": "test"}
    await setting.tuning.completed(PromotionCompleted(**told, speedup=None))
    await setting.tuning.rolled_back(PromotionRolledBack(**told, back_to=EMPTY))
    assert counted("told") == {("promotions_total", "completed"): 1, ("promotions_total", "rolled-back"): 1}


async def test_a_promotion_is_owed_until_the_promoter_answers(setting):
    await setting.tuning.window(setting.seen())
    setting.floor.away = True
    await setting.answer_all()
    await setting.tuning.tick()
    assert setting.floor.proposals == []
    setting.floor.away = False
    await setting.tuning.tick()
    await setting.tuning.tick()
    assert len(setting.floor.proposals) == 1
    assert [m.outcome for m in setting.outbox() if type(m).__name__ == "SearchClosed"] == ["promoted"]


async def test_a_pool_that_goes_wrong_is_told_once_and_the_others_go_on(lab, setting, caplog):
    await setting.tuning.window(setting.seen().model_copy(update={"pool": "a"}))
    await setting.tuning.window(setting.seen().model_copy(update={"pool": "b"}))
    honest = setting.floor.order_again

    async def broken(command):
        if command.pool == "a":
            raise ValueError("its state is from another release")
        await honest(command)

    setting.floor.order_again = broken
    setting.clock.at += dt.timedelta(seconds=101)
    await setting.tuning.tick()
    await setting.tuning.tick()
    assert {command.pool for command in setting.floor.again} == {"b"}
    assert [r.getMessage() for r in caplog.records if "stands still" in r.getMessage()] == [
        "pool a stands still until this is put right"
    ]


async def test_a_drift_that_nothing_can_be_searched_for_is_told(lab, setting, caplog):
    strange = setting.seen()
    shape = strange.shape.model_copy(update={"tokens_per_step": {"16384": 1.0}})
    await setting.tuning.window(strange.model_copy(update={"shape": shape}))
    assert "names M of ['16384']: buckets are (1, 2," in caplog.text
    assert setting.orders() == []


async def test_overdue_orders_go_straight_to_the_queue(setting):
    await setting.tuning.window(setting.seen())
    setting.clock.at += dt.timedelta(seconds=101)
    await setting.tuning.tick()
    assert setting.floor.again == setting.orders()


async def test_a_new_process_remembers_the_search_and_asks_for_what_is_pending(lab, setting):
    await setting.tuning.window(setting.seen())
    later = Setting(lab, setting.database)
    await later.tuning.start()
    await later.tuning.tick()
    assert later.floor.again == setting.orders()
    await later.answer_all()
    assert len(later.floor.proposals) == 1


async def test_lessons_outlive_the_process(lab, setting):
    await setting.tuning.window(setting.seen())
    await setting.answer_all()
    known = await Setting(lab, setting.database).record.knowledge()
    assert known.seeds(lab.DOWN, 1, 8, limit=3)
    assert (
        await LoopRecord(setting.database, setting.clock, source="/t", hardware="other").knowledge()
    ).lessons == ()


async def test_answers_of_a_search_that_nobody_runs_are_dropped(lab, setting):
    await setting.tuning.window(setting.seen())
    order = setting.orders()[0]
    stranger = lab.answer(order.model_copy(update={"evaluation_id": "evaluation-x"}), 1.3)
    before = setting.outbox()
    await setting.tuning.evaluated(stranger)
    assert setting.outbox() == before


async def test_a_refusal_asks_to_take_that_generation_back(lab, setting):
    refused = WorkerRefused(
        pool="chat-1", worker_id="w", generation=3, revision="r-1", reason="its self-test failed"
    )
    await setting.tuning.refused(refused)
    pool, generation, reason = setting.floor.taken_back[0]
    assert (pool, generation) == ("chat-1", 3)
    assert "its self-test failed" in reason


async def test_what_has_served_elsewhere_is_not_taken_back_for_one_worker_that_refuses(lab, setting, caplog):
    await setting.tuning.window(setting.seen())
    loaded = WorkerLoaded(
        pool="chat-1",
        worker_id="good",
        generation=3,
        revision="r-1",
        kernels=("a",),
        served_calls=7,
        load_s=1,
        paused_s=0,
    )
    await setting.tuning.loaded(loaded)
    later = Setting(lab, setting.database)
    await later.tuning.start()
    refused = WorkerRefused(
        pool="chat-1", worker_id="bad", generation=3, revision="r-1", reason="it lacks the key"
    )
    await later.tuning.refused(refused)
    assert later.floor.taken_back == []
    assert "r-1 has served elsewhere and stays; see to worker bad" in caplog.text
    await later.tuning.refused(refused.model_copy(update={"generation": 4, "revision": "r-2"}))
    assert [taken[1] for taken in later.floor.taken_back] == [4]


def faulted(setting, **changes):
    fields = {
        "pool": "chat-1",
        "worker_id": "w",
        "generation": 3,
        "revision": "r-1",
        "definition": "gemm_n8_k8_f32",
        "artifact": "f" * 64,
        "how": "crash",
        "evidence": "The engine ended inside call 17.",
        "at": setting.clock.now(),
    }
    return WorkerKernelFaulted(**{**fields, **changes})


async def test_a_kernel_that_took_an_engine_down_is_quarantined_whatever_it_served(lab, setting):
    await setting.tuning.window(setting.seen())
    await setting.tuning.loaded(
        WorkerLoaded(
            pool="chat-1",
            worker_id="good",
            generation=3,
            revision="r-1",
            kernels=("f" * 64,),
            served_calls=7,
            load_s=1,
            paused_s=0,
        )
    )
    await setting.tuning.kernel_faulted(faulted(setting))
    [(artifact, reason)] = setting.floor.quarantined
    assert artifact == "f" * 64
    assert reason == (
        "It had a crash in worker w, as gemm_n8_k8_f32 of r-1: The engine ended inside call 17."
    )


async def test_a_fault_is_heard_again_while_the_bus_is_away(lab, setting):
    setting.floor.away = True
    with pytest.raises(Retryable):
        await setting.tuning.kernel_faulted(faulted(setting))
    setting.floor.away = False
    await setting.tuning.kernel_faulted(faulted(setting, pool="of-another-compilers-making"))
    assert len(setting.floor.quarantined) == 1
