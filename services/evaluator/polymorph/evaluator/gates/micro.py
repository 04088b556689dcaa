"""Gates G3 and G4: a paired micro-benchmark in the hierarchical design, with a clock that the candidate cannot reach.

Both arms run in one process on the same OpenMP threads, pair by pair in random order; each arm is loaded anew several
times in each of several processes. The incumbent is the artifact that serves now, or vLLM's own operation called out of
its library; what a call of that costs in dispatch is measured on a 1 x 16 x 16 problem and taken off its time, so that a
candidate never wins by being called from C.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from polymorph.evaluator.adapters.sandbox.lane import (
    CandidateDied,
    CandidateRefused,
    Forged,
    Lane,
    Process,
)
from polymorph.evaluator.domain.cases import weights as draw_weight
from polymorph.evaluator.domain.number import Array, Floats, load, poisoned, store
from polymorph.evaluator.domain.operation import expected
from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive
from polymorph.evaluator.domain.roofline import Peaks
from polymorph.evaluator.domain.timing import Pair, calls_in_batch, copies_needed, schedule
from polymorph.evaluator.gates.arms import Arms, Batch, IncumbentRefused, Weights
from polymorph.evaluator.gates.findings import Design, Findings, Setting, evidence_of, verdict
from polymorph.evaluator.gates.host import Host, HostBusy
from polymorph.evaluator.gates.subject import GateFailed, Subject
from polymorph.events.values import Gate
from polymorph.kernels.schema import TraceStatus
from polymorph.sandbox.sealed import sealed
from polymorph.stats.hierarchical import log_ratio, speedup

_BANK = 1 << 22
_MOST_WAITED = 0.15  # share of processor time that a batch's threads may wait for a core
_EXTRA = 5  # how many times the planned pairs may be tried before the host counts as too busy
_NULL_CALLS = 400
_MOST_SLOTS = 1024
_PROBE_SLOTS = 64
_SHORT_S = 5e-4
_MOST_UNITS = (
    64.0  # of error in a timed call: what the checked calls allow is less, and depends on the incumbent
)


class Micro:
    """Times candidates against the incumbent."""

    def __init__(
        self,
        lane: Lane,
        peaks: Callable[[], Peaks],
        design: Design,
        cache_bytes: int,
        host: Callable[[], Host],
    ) -> None:
        self._lane, self._peaks, self._design = lane, peaks, design
        self._cache_bytes, self._host = cache_bytes, host

    def measure(self, subject: Subject, library: bytes, gate: Gate) -> Outcome:  # noqa: PLR0911
        """Times `library` at the M that has most of the operation's time."""
        if subject.incumbent is None and self._lane.native_problem:
            return inconclusive(gate, f"nothing to compare with: {self._lane.native_problem}")
        host = self._host()
        try:
            return self._run(subject, library, gate, host)
        except HostBusy as error:
            return inconclusive(gate, str(error), stolen_s=host.stolen_s)
        except IncumbentRefused as error:
            return inconclusive(gate, str(error))
        except CandidateDied as error:
            return failed(gate, TraceStatus.RUNTIME_ERROR, f"while it was timed, it {error}")
        except CandidateRefused as error:
            return failed(gate, TraceStatus.RUNTIME_ERROR, str(error))
        except Forged as error:
            return failed(gate, TraceStatus.REWARD_HACK, str(error))
        except GateFailed as error:
            return failed(gate, TraceStatus.REWARD_HACK, error.reason)
        finally:
            host.release()

    def _run(self, subject: Subject, library: bytes, gate: Gate, host: Host) -> Outcome:
        bench = _Bench(self._lane, self._design, self._cache_bytes, subject, library, host)
        try:
            found = bench.run()
        finally:
            bench.close()
        setting = bench.setting()
        evidence = {**evidence_of(found, setting, host), "real_inputs": bench.real}
        if not found.complete:
            return inconclusive(
                gate, f"the host was too busy: {found.discarded} pairs were disturbed", **evidence
            )
        ratio = speedup(found.logs)
        return verdict(setting, found, ratio, gate, self._design, self._peaks(), evidence)


class _Bench:
    """One measurement: the same weights and sizes in every process."""

    def __init__(
        self, lane: Lane, design: Design, cache_bytes: int, subject: Subject, library: bytes, host: Host
    ) -> None:
        self._lane, self._design, self._subject, self._library = lane, design, subject, library
        self._host = host
        self._rng = np.random.default_rng(subject.seed ^ 0x5EED)
        self.op, self.m = subject.operation, min(max(subject.heaviest, subject.min_m), subject.max_m)
        base = draw_weight(self.op, self._rng)
        self.weight_bytes = base.size * 2
        copies = copies_needed(self.weight_bytes, cache_bytes) if self.op.packs else 1
        self.weights = Weights.draw(self.op, base, copies, self._rng)
        self.resident = min(1.0, cache_bytes / (self.weight_bytes * copies)) if self.op.packs else 1.0
        bank = max(_BANK, 4 * self.m * self.op.depth)  # a batch is cut from it at a random place
        drawn = self._rng.standard_normal(bank, dtype=np.float32)
        self.real = with_real(drawn, [call.values["x"] for call in subject.captured], self._rng)
        self._bank: Array = store(drawn, self.op.dtype)
        self.slots = 0
        self.incumbent = "native" if subject.incumbent is None else "incumbent"

    def run(self) -> Findings:
        found = Findings(seconds={"candidate": [], self.incumbent: []})
        self._alone(found)
        for _ in range(self._design.processes):
            found.logs.append(self._process(found))
            if not found.complete:
                break
        return found

    def setting(self) -> Setting:
        copies = len(self.weights.values)
        return Setting(self.m, self.op.flops(self.m), self.resident, self.incumbent, self.slots, copies)

    def close(self) -> None:
        os.close(self.weights.fd)

    def _alone(self, found: Findings) -> None:
        """The incumbent in a process that never saw the candidate: how many calls fill a batch, and a yardstick for
        the incumbent beside it.
        """
        call_s = self._probe()
        most = len(self.weights.values) if self.op.packs else _MOST_SLOTS
        self.slots = self._most_slots(calls_in_batch(call_s, most))
        with self._lane.process(
            self._arms(candidate=False), native=self._native(), dtype=self.op.dtype
        ) as process:
            arms = self._arms_in(process, self.slots)
            arms.map()
            self._prepare(arms, self.incumbent)
            arms.run(self.incumbent, 0, 0, self._rng)
            self._host.ensure(0.3)
            found.dispatch_s = self._dispatch(process)
            times = []
            for start in range(5):
                self._host.ensure(min(0.28, 2 * call_s * self.slots))
                times.append(arms.run(self.incumbent, 0, start, self._rng).seconds)
            self._host.release()
            found.alone_s = statistics.median(times) / self.slots - found.dispatch_s
            arms.close()

    def _probe(self) -> float:
        """Seconds of one call of the incumbent, roughly; short calls are probed many at a time."""
        seconds = self._probe_with(1)
        return seconds if seconds > _SHORT_S else self._probe_with(self._most_slots(_PROBE_SLOTS))

    def _probe_with(self, slots: int) -> float:
        with self._lane.process(
            self._arms(candidate=False), native=self._native(), dtype=self.op.dtype
        ) as process:
            arms = self._arms_in(process, slots)
            arms.map()
            self._prepare(arms, self.incumbent)
            times = [arms.run(self.incumbent, 0, start, self._rng).seconds for start in range(4)]
            arms.close()
        return min(times) / slots

    def _process(self, found: Findings) -> list[list[float]]:
        logs: list[list[float]] = [[] for _ in range(self._design.loads)]
        with self._lane.process(
            self._arms(candidate=True), native=self._native(), dtype=self.op.dtype
        ) as process:
            arms = self._arms_in(process, self.slots)
            arms.map()
            for arm in ("candidate", self.incumbent):
                self._prepare(arms, arm)
                for load in range(self._design.loads):
                    arms.run(arm, load, load, self._rng)
            found.packed_bytes = arms.packed_bytes.get("candidate", 0)
            batches: list[Batch] = []
            for pair in self._pairs(logs):
                self._host.ensure(min(0.28, 3 * found.alone_s * self.slots))
                self._pair(arms, pair, logs, found, batches)
            self._host.release()
            self._audit(arms, batches)
            arms.close()
        return logs

    def _pairs(self, logs: list[list[float]]) -> Iterable[Pair]:
        """The schedule, and again those that were disturbed, up to a limit."""
        design, copies = self._design, len(self.weights.values)
        for _ in range(_EXTRA):
            missing = {load: design.pairs - len(done) for load, done in enumerate(logs)}
            if not any(count > 0 for count in missing.values()):
                return
            for pair in schedule(design.loads, design.pairs, copies, self._rng):
                if len(logs[pair.load]) < design.pairs:
                    yield pair

    def _pair(
        self, arms: Arms, pair: Pair, logs: list[list[float]], found: Findings, batches: list[Batch]
    ) -> None:
        order = ("candidate", self.incumbent) if pair.candidate_first else (self.incumbent, "candidate")
        done = {arm: arms.run(arm, pair.load, pair.start, self._rng) for arm in order}
        batches.append(done["candidate"])
        if max(batch.waited for batch in done.values()) > _MOST_WAITED:
            found.discarded += 1
            return
        seconds = {arm: batch.seconds / self.slots for arm, batch in done.items()}
        if self.incumbent == "native":
            seconds["native"] = max(seconds["native"] - found.dispatch_s, 1e-9)
        for arm, value in seconds.items():
            found.seconds[arm].append(value)
        logs[pair.load].append(log_ratio(seconds[self.incumbent], seconds["candidate"]))

    def _audit(self, arms: Arms, batches: list[Batch]) -> None:
        """Every timed output was written in time, and secret calls of every batch are right."""
        for batch in batches:
            for slot in range(self.slots):
                if any(poisoned(stored, self.op.dtype) for stored in arms.call(batch, slot)[1].values()):
                    raise GateFailed("a timed call had not written its whole output when it returned")
            self._check(*arms.call(batch, int(self._rng.integers(self.slots))))

    def _check(self, inputs: dict[str, Floats], outputs: dict[str, Array]) -> None:
        columns = self._rng.choice(self.op.columns, min(48, self.op.columns), replace=False)
        for name, reference in expected(self.op, inputs, columns).items():
            found = load(outputs[name], self.op.dtype)[:, columns].astype(np.float64)
            if not bool(np.all(np.abs(found - reference.value) <= _MOST_UNITS * reference.unit)):
                raise GateFailed(f"{name} was right when it was checked, wrong when it was timed")

    def _dispatch(self, process: Process) -> float:
        if self.incumbent != "native":
            return 0.0
        process.ask("null", count=20)
        times = []
        for count in (_NULL_CALLS, 0) * 3:
            began = time.perf_counter()
            process.ask("null", count=count)
            times.append(time.perf_counter() - began)
        return max(0.0, (min(times[::2]) - min(times[1::2])) / _NULL_CALLS)

    def _arms(self, *, candidate: bool) -> dict[str, list[int]]:
        loads = self._design.loads
        arms = {}
        if candidate:
            arms["candidate"] = [sealed("kernel", self._library) for _ in range(loads)]
        if self._subject.incumbent is not None:
            arms["incumbent"] = [sealed("kernel", self._subject.incumbent.content) for _ in range(loads)]
        return arms

    def _arms_in(self, process: Process, slots: int) -> Arms:
        return Arms(process, self.op, self.weights, self.m, slots, self._bank)

    def _prepare(self, arms: Arms, arm: str) -> None:
        packs = self._subject.solution.x_polymorph.layout_source is not None
        if arm == "incumbent" and self._subject.incumbent is not None:
            packs = self._subject.incumbent.packs
        arms.prepare(arm, raw=not packs and arm != "native")

    def _native(self) -> str:
        return self.op.kind if self.incumbent == "native" else ""

    def _most_slots(self, wanted: int) -> int:
        """No more than the bank of fresh contents and 64 MiB of outputs hold."""
        by_bank = self._bank.size // 2 // (self.m * self.op.depth)
        by_output = (64 << 20) // (4 * self.m * self.op.columns)
        return max(1, min(wanted, by_bank, by_output))


def with_real(bank: Floats, real: Sequence[Floats], rng: np.random.Generator) -> float:
    """Puts values that were captured into the first half of a bank of drawn ones; the share that they have of it.

    Each repetition has a factor of its own, and begins elsewhere: no two calls that are cut from the bank are equal.
    """
    values = np.concatenate([each.reshape(-1) for each in real]) if real else np.empty(0, dtype=np.float32)
    if not values.any():
        return 0.0
    half = bank.size // 2
    for begin in range(0, half, values.size):
        piece = bank[begin : min(begin + values.size, half)]
        turned = np.roll(values, -int(rng.integers(values.size)))[: piece.size]
        piece[:] = turned * np.float32(rng.uniform(0.5, 1.5))
    return half / bank.size
