"""Captures of real inputs over a bus, with the real dispatcher; the engine is one layer (see OneLayer)."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load as load_ops
from polymorph.engine.loading.admission import Refused
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.events.requests import CaptureInputs
from polymorph.kernels.schema import Workload
from polymorph.worker.capturing import PART_BYTES, Capturing
from polymorph.worker.handlers import Asked
from polymorph.workloads.collect import NotCaptured, captured

N, K = 48, 112
DEFINITION = f"gemm_n{N}_k{K}_f32"
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class OneLayer:
    """An engine of one linear layer, called without a pause."""

    alive = True

    def __init__(self) -> None:
        weight = torch.randn(N, K)
        self.slots = Slots(ops=load_ops(), weights=WeightStore(1 << 30), packed_budget=1 << 30)
        self.layer = self.slots.add_linear(weight, 2, weight, held_by_model=False)
        self.rows = 4

    @property
    def engine(self) -> "OneLayer":
        return self

    def runs(self, revision: str) -> None:
        del revision

    async def capture(
        self, definition: str, calls: int, every: int, low: int, high: int, *, max_mib: int, ring: bool
    ) -> None:
        try:
            self.slots.ops.capture_start(definition, calls, every, max_mib << 20, low, high, ring)
        except ValueError as error:
            raise Refused(str(error).splitlines()[0]) from error

    async def captured(self, directory: Path) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = collect(self.slots, directory)["calls"]
        return calls

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

    async def ask(self, **wanted: Any) -> tuple[str, Workload]:
        asked = Asked(None, None, self.capturing)  # type: ignore[arg-type]
        end = await self.worker_bus.respond(CaptureInputs, "w", asked.capture)
        serving = asyncio.create_task(self.engine.serve())
        try:
            request = CaptureInputs(worker_id="w", **{"definition": DEFINITION, "seconds": 0.1} | wanted)
            return await captured(self.bus, request, NOW)
        finally:
            serving.cancel()
            await end()


async def test_inputs_become_a_workload_that_expires(tmp_path: Path) -> None:
    house = House(tmp_path)
    digest, workload = await house.ask(calls=3)
    stored = await house.bus.get_object(digest, store=topology.CAPTURES)
    assert Workload.model_validate_json(stored) == workload
    assert workload.axes == {"M": 4}
    extension = workload.x_polymorph
    assert extension.privacy == "captured"
    assert extension.captured_at == NOW.isoformat()
    assert extension.expires_at == (NOW + dt.timedelta(seconds=topology.CAPTURES_AGE_S)).isoformat()
    captures = (extension.model_extra or {})["captures"]
    assert [each["m"] for each in captures] == [4, 4, 4]
    assert workload.inputs["weight"] == {"type": "random"}
    named = workload.inputs["x"]
    content = await house.bus.get_object(named["path"], store=topology.CAPTURES)
    assert load(content)[named["tensor_key"]].shape == (4, K)


async def test_what_derives_from_users_text_never_lies_among_the_artifacts(tmp_path: Path) -> None:
    house = House(tmp_path)
    digest, workload = await house.ask()
    for name in (digest, workload.inputs["x"]["path"]):
        with pytest.raises(NotFound):
            await house.bus.get_object(name)
    assert not list((tmp_path / "captures").glob("*"))


async def test_large_inputs_come_in_parts(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.engine.rows = 3 * PART_BYTES // (4 * K)
    _, workload = await house.ask(calls=2, seconds=0.3)
    assert workload.axes["M"] == house.engine.rows


async def test_capture_is_off_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(NotCaptured, match="capture: content"):
        await House(tmp_path, "off").ask()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"definition": "gemm_n7_k7_f32"}, "no slot has the definition"),
        ({"min_m": 100}, "no call of"),
    ],
)
async def test_a_capture_without_calls_says_why(tmp_path: Path, wanted: Any, reason: str) -> None:
    with pytest.raises(NotCaptured, match=reason):
        await House(tmp_path).ask(**wanted)


async def test_none_while_kernels_change(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.change:
        with pytest.raises(NotCaptured, match="changing its kernels"):
            await house.ask()


async def test_bytes_that_are_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymorph.worker import capturing

    native = capturing.CapturePart
    monkeypatch.setattr(
        capturing, "CapturePart", lambda call, content: native(call=call, content=content[:-4])
    )
    with pytest.raises(NotCaptured, match="or they are others"):
        await House(tmp_path).ask()
