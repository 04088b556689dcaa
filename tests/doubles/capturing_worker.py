"""A worker that answers captures over a bus, with the real dispatcher; its engine is one layer."""

import asyncio
import contextlib
import datetime as dt
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.counters import Counters
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.events.requests import CaptureInputs
from polymorph.kernels.schema import Workload
from polymorph.worker.capturing import Capturing
from polymorph.worker.handlers import Asked
from polymorph.workloads.collect import captured

N, K = 48, 112
DEFINITION = f"gemm_n{N}_k{K}_f32"
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class OneLayer:
    """An engine of one linear layer, called without a pause."""

    alive = True

    def __init__(self) -> None:
        weight = torch.randn(N, K)
        self.slots = Slots(ops=load(), weights=WeightStore(1 << 30), packed=PackedWeights(1 << 30))
        self.layer = self.slots.add_linear(weight, 2, weight, held_by_model=False)
        self.rows = 4

    @property
    def engine(self) -> "OneLayer":
        return self

    def runs(self, revision: str) -> None:
        del revision

    async def capture(
        self,
        definition: str,
        calls: int,
        every: int,
        low: int,
        high: int,
        *,
        max_mib: int = 64,
        ring: bool = False,
    ) -> None:
        try:
            self.slots.ops.capture_start(definition, calls, every, max_mib << 20, low, high, ring)
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

    async def counters(self) -> Counters:
        return Counters.of(json.loads(self.slots.ops.read_counters(False)) | {"steps": {}})

    async def serve(self) -> None:
        while True:
            self.slots.ops.linear(torch.randn(self.rows, K), None, self.layer, N)
            await asyncio.sleep(0.002)


class House:
    """A worker that answers captures, and who asks."""

    def __init__(self, folder: Path, allowed: Any = "content") -> None:
        self.folder = folder
        world = MemoryWorld()
        self.worker_bus = InMemoryBus("/worker", SystemClock(), world)
        self.bus = InMemoryBus("/asker", SystemClock(), world)
        self.engine = OneLayer()
        self.change = asyncio.Lock()
        self.capturing = Capturing(allowed, "m", self.engine, self.change, folder / "captures", SystemClock())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Bus]:
        asked = Asked(None, None, self.capturing)  # type: ignore[arg-type]
        end = await self.worker_bus.respond(CaptureInputs, "w", asked.capture)
        serving = asyncio.create_task(self.engine.serve())
        try:
            yield self.bus
        finally:
            serving.cancel()
            await end()

    async def ask(self, **wanted: Any) -> tuple[str, Workload]:
        async with self.serving() as bus:
            request = CaptureInputs(worker_id="w", **{"definition": DEFINITION, "seconds": 0.1} | wanted)
            entry, workload = await captured(bus, request, "p", NOW)
            return entry.workload, workload
