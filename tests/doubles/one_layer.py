"""An engine of one linear layer, and who says that it has the seat: the slots are real, only vLLM is missing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import torch

from polymorph.engine.bindings import BindingRefused
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.counters import Counters
from polymorph.engine.loading.engine import Engaged
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore


class OneLayer:
    """Requests are calls of the layer, which has `k` inputs and `n` outputs."""

    alive = True
    features = ()
    known = ()

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        weight = torch.randn(n, k).bfloat16().float()
        self.slots = Slots(ops=load(), weights=WeightStore(1 << 30), packed=PackedWeights(1 << 30))
        self.layer = self.slots.add_linear(weight, 2, weight, held_by_model=False)
        self.pauses = 0
        self.paused = False
        self.scheduler = self
        self.salts: list[str | None] = []

    async def salt(self, revision: str | None) -> None:
        self.salts.append(revision)

    async def definitions(self) -> tuple[str, ...]:
        return tuple(self.slots.definitions())

    def counted(self) -> Counters:
        return Counters.of(json.loads(self.slots.ops.read_counters(False)) | {"steps": {}})

    async def counters(self) -> Counters:
        return self.counted()

    async def engage(self, bindings: Any, *, keep_packed: bool = False) -> Engaged:
        counted = self.counted()
        try:
            self.slots.engage([vars(binding) for binding in bindings], keep_packed=keep_packed)
        except BindingRefused as error:
            raise Refused(str(error)) from error
        return Engaged(0.001, counted)

    async def capture(
        self,
        definition: str,
        calls: int,
        every: int,
        min_m: int,
        max_m: int,
        *,
        max_mib: int = 64,
        ring: bool = False,
    ) -> None:
        try:
            self.slots.ops.capture_start(definition, calls, every, max_mib << 20, min_m, max_m, ring)
        except ValueError as error:
            raise Refused(str(error).splitlines()[0]) from error

    async def captured(self, directory: Path, *, weight: bool = False) -> list[dict[str, Any]]:
        answer = collect(self.slots, directory, weight=weight)
        if not answer["ok"]:
            raise Refused(answer["reason"])
        calls: list[dict[str, Any]] = answer["calls"]
        return calls

    async def capture_stop(self) -> None:
        self.slots.ops.capture_finish()

    async def exercise(self, m: int) -> None:
        self.slots.ops.linear(torch.randn(m, self.k), None, self.layer, self.n)

    async def pause(self) -> None:
        self.pauses += 1
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def serve(self, rows: int) -> None:
        """Runs until cancelled: calls of so many rows, one after the other."""
        while True:
            await self.exercise(rows)
            await asyncio.sleep(0.002)


class Seated:
    """One engine that always has the seat."""

    alive = True
    revision = "empty"

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def runs(self, revision: str) -> None:
        self.revision = revision
