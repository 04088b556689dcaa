"""A worker that answers captures over a bus, with the real dispatcher; its engine is one layer."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.doubles.one_layer import OneLayer, Seated

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.events.requests import CaptureInputs
from polymorph.kernels.schema import Workload
from polymorph.worker.capturing import Capturing
from polymorph.worker.handlers import Asked
from polymorph.workloads.collect import captured

N, K = 48, 112
DEFINITION = f"gemm_n{N}_k{K}_f32"
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class House:
    """A worker that answers captures, and who asks."""

    def __init__(self, folder: Path, allowed: Any = "content") -> None:
        self.folder = folder
        world = MemoryWorld()
        self.worker_bus = InMemoryBus("/worker", SystemClock(), world)
        self.bus = InMemoryBus("/asker", SystemClock(), world)
        self.engine = OneLayer(N, K)
        self.rows = 4
        self.change = asyncio.Lock()
        self.capturing = Capturing(
            allowed, "m", Seated(self.engine), self.change, folder / "captures", SystemClock()
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Bus]:
        asked = Asked(None, None, self.capturing)  # type: ignore[arg-type]
        end = await self.worker_bus.respond(CaptureInputs, "w", asked.capture)
        serving = asyncio.create_task(self.engine.serve(self.rows))
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
