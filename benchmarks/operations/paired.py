"""One operation by the engine's own code and by kernels of ours, in interleaved pairs.

A `Case` calls the operation through its slot, as a model does: each call meets the data of another layer. With the slot
empty that is vLLM's native code; with a kernel engaged it is ours. The best of a first look is measured once more on
fresh pairs, so that the reported figure is not the luckiest of many.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from polymorph.engine.slots import Slots
from polymorph.kernels.buckets import bucket, lower_bound
from polymorph.kernels.catalogue.artifacts import Artifact

Call = Callable[[], Any]
_FIGURES = ("native_us", "ours_us", "ratio", "lowest", "undisturbed")
_SAMPLE_S = 0.004
_TOLERANCE = 1e-4


class WrongKernel(RuntimeError):
    """A kernel that gives other results than the native code, or did not serve what was timed."""


def close(found: Any, wanted: Any) -> bool:
    """Whether all floating outputs agree up to rounding (root mean square of the difference), and all others exactly."""
    if found is None or wanted is None:
        return found is wanted
    if not isinstance(found, torch.Tensor):
        return all(close(one, other) for one, other in zip(found, wanted, strict=True))
    if not found.is_floating_point():
        return bool(torch.equal(found, wanted))
    tolerance = max(_TOLERANCE, 2 * torch.finfo(found.dtype).eps)
    off = (found.double() - wanted.double()).square().mean().sqrt()
    return bool(off <= tolerance * wanted.double().square().mean().sqrt().clamp_min(1e-30))


@dataclass(frozen=True)
class Case:
    """`definition` at `m` tokens in a model: a call for each layer, through the slot, and what vLLM calls without one
    where that is not the slot's native code.
    """

    operation: str
    model: str
    m: int
    definition: str
    calls: Sequence[Call]
    without_slot: Sequence[Call] = ()
    same: Callable[[Any, Any], bool] = close


@dataclass(frozen=True)
class Compared:
    """Times of one call, undisturbed (see `fastest`), and `undisturbed` their ratio, native over ours; `ratio` is the median
    of all pairs, `lowest` the least of them.
    """

    case: Case
    native_us: float
    ours_us: float
    ratio: float
    lowest: float
    undisturbed: float
    kernel: str
    candidates: int
    without_slot_us: float | None

    def line(self) -> str:
        """As the table has it."""
        case = self.case
        stock = "" if self.without_slot_us is None else f"   without a slot {self.without_slot_us:9.1f} us"
        return (
            f"{case.model:22} {case.definition:36} M={case.m:<4} native {self.native_us:9.1f} us   "
            f"ours {self.ours_us:9.1f} us   {self.ratio:6.3f} (lowest {self.lowest:.3f}, "
            f"undisturbed {self.undisturbed:.3f})   {self.kernel}{stock}"
        )

    def row(self) -> dict[str, Any]:
        """As the JSON line has it."""
        case = self.case
        told = {"operation": case.operation, "model": case.model, "m": case.m, "definition": case.definition}
        figures = {name: getattr(self, name) for name in _FIGURES}
        told |= {name: round(value, 3) for name, value in figures.items()}
        told |= {"kernel": self.kernel, "candidates": self.candidates}
        return told | {"without_slot_us": self.without_slot_us and round(self.without_slot_us, 3)}


def compared(slots: Slots, case: Case, artifacts: Sequence[Artifact], rounds: int, rng: Random) -> Compared:
    """The native code against the best of `artifacts`.

    Raises:
        WrongKernel: one of them is wrong, or did not serve.
        ValueError: there are none.
    """
    if not artifacts:
        raise ValueError(f"{case.definition}: the catalogue has no kernel for it")
    wanted = case.calls[-1]()
    arms = [Arm(slots, case, None), *(Arm(slots, case, artifact) for artifact in artifacts)]
    for arm in arms[1:]:
        arm.check(wanted)
    if case.without_slot:
        arms.append(Arm(slots, case, None, case.without_slot))
    first = interleaved(arms, rounds, rng)
    best = min(range(1, 1 + len(artifacts)), key=lambda index: fastest(first[index]))
    native, ours = interleaved([arms[0], arms[best]], 2 * rounds + 1, rng)
    slots.engage([], keep_packed=True)
    ratios = [one / other for one, other in zip(native, ours, strict=True)]
    return Compared(
        case=case,
        native_us=fastest(native) * 1e6,
        ours_us=fastest(ours) * 1e6,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        undisturbed=fastest(native) / fastest(ours),
        kernel=artifacts[best - 1].label,
        candidates=len(artifacts),
        without_slot_us=fastest(first[-1]) * 1e6 if case.without_slot else None,
    )


class Arm:
    """One way to run a case."""

    def __init__(
        self, slots: Slots, case: Case, artifact: Artifact | None, calls: Sequence[Call] = ()
    ) -> None:
        self._slots, self._case, self._artifact = slots, case, artifact
        self._calls = calls or case.calls
        self._repeats = 0

    def seconds(self) -> float:
        """Of one call, in a sample that is long enough to be read off the clock."""
        self.engage()
        once = _timed(self._calls, 1)  # also warms up
        self._repeats = self._repeats or max(1, round(_SAMPLE_S / (once * len(self._calls))))
        return _timed(self._calls, self._repeats)

    def engage(self) -> None:
        upper = bucket(self._case.m)
        bindings = []
        if self._artifact is not None:
            bindings.append(self._artifact.binding(lower_bound(upper), upper))
        self._slots.engage(bindings, keep_packed=True)

    def check(self, wanted: Any) -> None:
        artifact = self._artifact
        if artifact is None:
            return
        self.engage()
        self._slots.ops.read_counters(True)
        found = self._case.calls[-1]()
        told = json.loads(self._slots.ops.read_counters(False))["artifacts"].get(artifact.digest)
        if told is None or told["served"]["calls"] != 1:
            raise WrongKernel(f"{self._case.definition}: {artifact.label} did not serve: {told}")
        if not self._case.same(found, wanted):
            raise WrongKernel(
                f"{self._case.definition} at M = {self._case.m}: {artifact.label} gives other results"
            )


def interleaved(arms: Sequence[Arm], rounds: int, rng: Random) -> list[list[float]]:
    """Seconds of a call of every arm in every round, the arms of a round in random order."""
    times: list[list[float]] = [[] for _ in arms]
    with _no_collection():
        for _ in range(rounds):
            for index in rng.sample(range(len(arms)), len(arms)):
                times[index].append(arms[index].seconds())
    return times


def fastest(seconds: Sequence[float]) -> float:
    """The mean of the fastest tenth: what a machine that others use as well does when they pause."""
    count = max(1, len(seconds) // 10)
    return statistics.mean(sorted(seconds)[:count])


def _timed(calls: Sequence[Call], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        for call in calls:
            call()
    return (time.perf_counter() - began) / (repeats * len(calls))


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
