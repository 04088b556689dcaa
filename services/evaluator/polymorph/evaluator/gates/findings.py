"""What a micro-benchmark found, and what follows from it."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive, passed
from polymorph.evaluator.domain.roofline import Call, Peaks
from polymorph.evaluator.gates.host import Host
from polymorph.events.values import Gate, Ratio
from polymorph.kernels.schema import TraceStatus
from polymorph.stats.hierarchical import Spread, spread
from polymorph.stats.margin import Call as Judgement
from polymorph.stats.margin import judge

_FEWEST_PAIRS = 2
_SLOWER_BESIDE = 1.25
_LEAST_OWN = 0.4  # share of a timed call that must be the operation's own


@dataclass(frozen=True, slots=True)
class Design:
    """The hierarchical design: processes, loads in each, pairs for each load."""

    processes: int = 5
    loads: int = 5
    pairs: int = 4
    margin: float = 0.01
    widest: float = 0.10


@dataclass(frozen=True, slots=True)
class Setting:
    """What every process of one measurement shares. `flops` is of one call."""

    m: int
    flops: float
    resident: float
    incumbent: str
    slots: int
    copies: int


@dataclass(slots=True)
class Findings:
    """What the processes of one measurement gave."""

    logs: list[list[list[float]]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    discarded: int = 0
    packed_bytes: int = 0
    dispatch_s: float = 0.0
    alone_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every load kept enough undisturbed pairs for a centre of its own."""
        return all(len(load) >= _FEWEST_PAIRS for process in self.logs for load in process)


def verdict(
    setting: Setting,
    found: Findings,
    ratio: Ratio,
    gate: Gate,
    design: Design,
    peaks: Peaks,
    evidence: dict[str, Any],
) -> Outcome:
    ours, theirs = (statistics.median(found.seconds[arm]) for arm in ("candidate", setting.incumbent))
    call = Call(max(found.packed_bytes, 0), setting.flops, setting.resident)
    text = (
        f"{ratio.point:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}] of the incumbent at M = {setting.m}: "
        f"{ours * 1e6:.1f} us a call against {theirs * 1e6:.1f} us; it {call.describe(ours, peaks)}"
    )
    if ours < call.floor_s(peaks):
        hack = f"faster than this machine can be ({call.floor_s(peaks) * 1e6:.1f} us at least): {text}"
        return failed(gate, TraceStatus.REWARD_HACK, hack, speedup=ratio, **evidence)
    if theirs < _LEAST_OWN * (theirs + found.dispatch_s):
        short = f"a call is too short to be told from its dispatch ({found.dispatch_s * 1e6:.1f} us): {text}"
        return inconclusive(gate, short, speedup=ratio, **evidence)
    if setting.incumbent == "native" and theirs > _SLOWER_BESIDE * found.alone_s:
        beside = (
            f"the incumbent is {theirs / found.alone_s:.2f}x slower beside the candidate than alone: {text}"
        )
        return inconclusive(gate, beside, speedup=ratio, **evidence)
    judgement = judge(ratio, margin=design.margin, widest=design.widest)
    if judgement is Judgement.BETTER:
        return passed(gate, text, speedup=ratio, **evidence)
    if judgement is Judgement.UNDECIDED:
        return inconclusive(gate, f"too noisy to tell: {text}", speedup=ratio, **evidence)
    return failed(gate, TraceStatus.PASSED, f"right, but no faster: {text}", speedup=ratio, **evidence)


def evidence_of(found: Findings, setting: Setting, host: Host) -> dict[str, Any]:
    levels = spread(found.logs) if found.complete else Spread(0.0, 0.0, 0.0)
    return {
        "log_ratios": found.logs, "m": setting.m, "calls_in_batch": setting.slots, "copies": setting.copies,
        "discarded": found.discarded, "dispatch_s": found.dispatch_s, "incumbent_alone_s": found.alone_s,
        "packed_bytes": found.packed_bytes, "incumbent": setting.incumbent,
        "median_s": {arm: statistics.median(times) for arm, times in found.seconds.items() if times},
        "spread": {
            "processes": levels.between_processes, "loads": levels.between_loads, "pairs": levels.within_load,
        },
        "stolen_s": host.stolen_s, "bursts": host.bursts,
    }  # fmt: skip
