"""Kernels swapped by promotions, each a desired state that one kernel differs in, and what was seen of them."""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.hotload.artifacts import operation
from benchmarks.hotload.house import Failed, House

from polymorph.events.values import KernelBinding

Span = tuple[float, float]
Kernels = dict[str, tuple[KernelBinding, ...]]


@dataclass
class Swaps:
    """What was swapped, and when; the spans of monotonic seconds with swaps, each with one of equal length without."""

    tried: int = 0
    reasons: list[str] = field(default_factory=list)
    artifacts: set[str] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)
    blocks: list[tuple[Span, Span]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return len(self.seconds)

    @property
    def failed(self) -> int:
        return len(self.reasons)

    def told(self) -> str:
        return f"{self.done} done, {self.failed} failed, {statistics.median(self.seconds or [0]):.2f} s each"


class Swapping:
    """Knows what the worker runs, and changes it one kernel at a time."""

    def __init__(self, house: House, say: Callable[[str], None]) -> None:
        self._house = house
        self._say = say
        self._runs: dict[str, KernelBinding] = {}
        self._bad: set[str] = set()

    async def first_loads(self, kernels: Kernels, rest_s: float = 0.0) -> Swaps:
        """Every kernel once, in turn over the operations: fetched, inspected and tried in a sandbox before it serves.

        Then as long without, `rest_s` at most.
        """
        first = Swaps()
        began = time.monotonic()
        for variant in range(max(map(len, kernels.values()))):
            for made in kernels.values():
                if variant < len(made):
                    await self._swap(made[variant], first)
            self._say(f"first loads: {first.told()}")
        middle = time.monotonic()
        await asyncio.sleep(min(middle - began, rest_s))
        first.blocks.append(((began, middle), (middle, time.monotonic())))
        return first

    async def blocks(self, kernels: Kernels, count: int, size: int) -> Swaps:
        """`count` swaps between kernels that were loaded before, in blocks; after each as long a block without."""
        swaps = Swaps()
        names = list(kernels)
        while swaps.tried < count:
            began = time.monotonic()
            for _ in range(min(size, count - swaps.tried)):
                await self._swap(self._next(kernels[names[swaps.tried % len(names)]], swaps.tried), swaps)
            middle = time.monotonic()
            await asyncio.sleep(middle - began)
            swaps.blocks.append(((began, middle), (middle, time.monotonic())))
            self._say(f"{swaps.tried} of {count} swaps: {swaps.told()}")
        return swaps

    def _next(self, made: tuple[KernelBinding, ...], number: int) -> KernelBinding:
        """Another kernel than the one that runs; one that was refused before only where there is no other."""
        running = self._runs.get(made[0].definition)
        others = [each for each in made if each != running]
        good = [each for each in others if each.artifact not in self._bad]
        return (good or others)[number % len(good or others)]

    async def _swap(self, kernel: KernelBinding, swaps: Swaps) -> None:
        """Counts as failed where the read-back does not show that the kernel served."""
        swaps.tried += 1
        wanted = {**self._runs, kernel.definition: kernel}
        began = time.monotonic()
        try:
            told = await self._house.promote(tuple(wanted.values()))
        except Failed as error:
            self._failed(kernel, str(error), swaps)
            return
        served = told["served"]
        self._runs = wanted
        if not (isinstance(served, dict) and served.get(kernel.artifact, 0) > 0):
            self._failed(kernel, f"{kernel.artifact[:12]} was engaged and served nothing", swaps)
            return
        swaps.artifacts.add(kernel.artifact)
        swaps.operations.add(operation(kernel.definition))
        swaps.seconds.append(time.monotonic() - began)
        swaps.paused_s.append(float(str(told["paused_s"])))

    def _failed(self, kernel: KernelBinding, reason: str, swaps: Swaps) -> None:
        self._bad.add(kernel.artifact)
        swaps.reasons.append(f"{kernel.definition}: {reason[:300]}")
        self._say(f"failed: {swaps.reasons[-1]}")
