"""A worker whose changes, seats, turns and desired states are real; its engines and its loader are doubles."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus import topology
from polymorph.bus.errors import NotFound, Retryable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import StreamRecord
from polymorph.config.clock import SystemClock
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Fence, Refused, check_quarantine
from polymorph.engine.loading.counters import NOTHING
from polymorph.engine.loading.engine import Engaged
from polymorph.engine.loading.loader import Loaded
from polymorph.events.state import DesiredState, PromoterSignature, WorkerRecord
from polymorph.events.values import EngineSettings, KernelBinding, Numerics, Revision
from polymorph.kernels.signing import Role, Signer, Trust
from polymorph.worker.adapters import memory
from polymorph.worker.adapters.scheduler import InForce
from polymorph.worker.changing import Changing
from polymorph.worker.convergence import Convergence
from polymorph.worker.domain.change import GIB
from polymorph.worker.faults import Faults
from polymorph.worker.rolling import Rolling
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.switchboard import Switchboard

BASE = EngineLaunch(Path("m"), max_num_seqs=8, envelope_num_seqs=64, envelope_batched_tokens=1024)
_LIVE = ("max_num_seqs", "max_num_batched_tokens", "scheduling_policy")
_WAIT_S = 10.0


class Engine:
    """Says what it was launched with, and keeps what it was made to run: artifacts, newest last."""

    processes: tuple[int, ...] = ()
    flight = None

    def __init__(self, launch: EngineLaunch) -> None:
        self.launch = launch
        self.alive = True
        self.scheduler = self
        self.settings = {name: getattr(launch, name) for name in _LIVE}
        self.step = 1
        self.salts: list[str | None] = []
        self.engaged: list[tuple[str, ...]] = []
        self.refuses: set[str] = set()
        self.silences: set[str] = set()
        self.tried = 0
        self.reads_lost = 0

    @property
    def runs(self) -> tuple[str, ...]:
        return self.engaged[-1] if self.engaged else ()

    async def known(self) -> InForce:
        return await self.read()

    async def read(self) -> InForce:
        if self.reads_lost:
            self.reads_lost -= 1
            raise Retryable("the engine does not answer polymorph_settings")
        config = {"block_size": self.launch.block_size or 16}
        return InForce(dict(self.settings), {"max_num_seqs": 64}, {}, config, self.step, 0.0)

    async def set(self, changes: dict[str, Any]) -> InForce:
        self.settings.update(changes)
        return await self.read()

    async def salt(self, salt: str | None) -> None:
        self.salts.append(salt)

    async def exercise(self, m: int) -> None:
        self.step += m

    async def engage(self, bindings: Iterable[SlotBinding], *, keep_packed: bool = False) -> Engaged:
        del keep_packed
        artifacts = tuple(binding.artifact for binding in bindings)
        if not self.refuses.isdisjoint(artifacts):
            raise Refused("its kernel serves nothing here")
        if not self.silences.isdisjoint(artifacts):
            self.tried += 1
            raise Retryable("the engine does not answer slots_engage")
        self.engaged.append(artifacts)
        return Engaged(0.0, NOTHING)

    async def counters(self) -> Any:
        return NOTHING


class Loader:
    """Prepares whatever is not in quarantine, once it may."""

    def __init__(self, engine: Any, may: asyncio.Event, missing: set[str]) -> None:
        self.engine = engine
        self._may = may
        self._missing = missing

    async def prepare(self, revision: Revision, quarantined: set[str]) -> tuple[SlotBinding, ...]:
        check_quarantine(revision.kernels, quarantined)
        if not self._missing.isdisjoint(kernel.artifact for kernel in revision.kernels):
            raise NotFound("an artifact is not there yet")
        await self._may.wait()
        return tuple(SlotBinding(k.definition, k.min_m, k.max_m, "", k.artifact) for k in revision.kernels)

    async def engage(self, revision: Revision, bindings: tuple[SlotBinding, ...]) -> Loaded:
        await self.engine.engage(bindings)
        return Loaded(revision, bindings, {}, 0.0)


class MovingWorker:
    """`room` says whether a second engine fits, `fails` why one does not start; no engine runs an artifact of
    `refuses` or answers a call for one of `silences`, and none is there of `missing`. An engine that is launched with another
    block size loses the answers to its first `reads_lost` reads.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, room: int = 100 * GIB) -> None:
        monkeypatch.setattr("polymorph.worker.changing.on_cpu", lambda: True)
        monkeypatch.setattr("polymorph.worker.rolling.HEARTBEAT_S", 0.01)
        monkeypatch.setattr("polymorph.worker.rolling._TURN_POLL_S", 0.01)
        monkeypatch.setattr(memory, "available", lambda: room)
        clock = SystemClock()
        self.bus = InMemoryBus("/polymorph/test/0", clock, MemoryWorld())
        self.board = Switchboard(5.0)
        self.engines: list[Engine] = []
        self.fails: Callable[[EngineLaunch], str] = lambda launch: ""
        self.refuses: set[str] = set()
        self.silences: set[str] = set()
        self.reads_lost = 0
        self.ends_badly = False
        self.missing: set[str] = set()
        self.states: list[bool] = []
        self.may_test = asyncio.Event()
        self.may_test.set()
        self.seats = Seats(self.board, self._open, self._close, clock)
        self.faults = Faults(folder / "faults.json", "p", "w", clock)
        self._promoter = Signer.generate(folder / "p.pem")
        trust = Trust()
        trust.add(self._promoter.public, Role.PROMOTER)
        rolling = Rolling("p", "w", clock, lambda: self.bus, self._leaving, 5.0)
        self.changing = Changing(self.seats, BASE, rolling)
        self.convergence = Convergence(
            "p", "w", Fence("p", trust), self.seats, self.changing, self.faults, self._loader, clock
        )
        self.trying = self.convergence._trying
        self.heard = self.convergence._hearing
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Seat:
        seat = await self.seats.open(BASE)
        self.seats.seat(seat)
        for each in (self.convergence.run, self.convergence.watch, self.faults.watch):
            self._tasks.append(asyncio.create_task(each(self.bus)))
        return seat

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def desire(self, generation: int, *kernels: KernelBinding, name: str = "", **settings: Any) -> None:
        name = name or (f"r{generation}" if kernels or settings else "empty")
        engine = EngineSettings(**settings) if settings else None
        state = DesiredState(
            pool="p", generation=generation, stable=Revision(revision=name, kernels=kernels, engine=engine)
        )
        signature = self._promoter.sign(state.signed_content())
        signed = PromoterSignature(key_id=self._promoter.key_id, signature=signature)
        document = state.model_copy(update={"signature": signed}).model_dump_json()
        await self.bus.kv_put(topology.DESIRED, "p", document.encode())

    async def quarantine(self, kernel: KernelBinding) -> None:
        await self.bus.kv_put(topology.QUARANTINE, kernel.artifact, b"it crashed elsewhere")

    async def another_ready(self) -> None:
        """One that newcomers can go to: a change may wait for the requests here as long as they take."""
        record = WorkerRecord(
            worker_id="w2",
            pool="p",
            model="m",
            url="u",
            state="ready",
            generation=0,
            revision="empty",
            hardware="h",
            started_at=SystemClock().now(),
        )
        await self.bus.kv_put(topology.WORKERS, "w2", record.model_dump_json().encode())

    async def told(self, kind: str, generation: int) -> dict[str, Any]:
        async with asyncio.timeout(_WAIT_S):
            async for record in self.bus.events(after="0-0"):
                if isinstance(record, StreamRecord) and record.envelope.type.split(".")[3] == kind:
                    data: dict[str, Any] = record.envelope.data
                    if data["generation"] == generation:
                        return data
        raise AssertionError("the stream ended")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    def _loader(self, bus: Any, engine: Any) -> Any:
        del bus
        return Loader(engine, self.may_test, self.missing)

    async def _open(self, launch: EngineLaunch) -> Seat:
        await asyncio.sleep(0)
        if reason := self.fails(launch):
            raise EngineNotStarted(reason)
        self.engines.append(Engine(launch))
        self.engines[-1].refuses, self.engines[-1].silences = self.refuses, self.silences
        if launch.block_size:
            self.engines[-1].reads_lost = self.reads_lost
        return Seat(self.engines[-1], None, launch, None)  # type: ignore[arg-type]

    async def _close(self, seat: Seat) -> None:
        seat.engine.alive = False  # type: ignore[misc]
        if self.ends_badly:
            raise RuntimeError("a lifespan failed to end")

    async def _leaving(self, yes: bool) -> None:
        self.states.append(yes)


def kernel(letter: str, numerics: Numerics = Numerics.BITWISE) -> KernelBinding:
    return KernelBinding(
        definition="gemm_n48_k80_f32",
        min_m=1,
        max_m=8,
        manifest=letter * 64,
        artifact=letter * 64,
        numerics=numerics,
    )
