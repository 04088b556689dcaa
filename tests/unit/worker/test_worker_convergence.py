"""Convergence with the real dispatcher in this process; only vLLM around it is missing."""

import asyncio
import contextlib
import functools
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from tests.doubles.one_layer import OneLayer, Seated

from polymorph.bus import topology
from polymorph.bus.errors import Poison, Retryable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import StreamRecord
from polymorph.bus.server_config import MAX_PAYLOAD_BYTES
from polymorph.config.clock import SystemClock
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Fence, Refused
from polymorph.engine.loading.counters import Counters
from polymorph.engine.loading.engine import Engaged
from polymorph.engine.loading.libraries import Libraries
from polymorph.engine.loading.loader import Loader
from polymorph.events.requests import LeaseHost
from polymorph.events.state import DesiredState, PromoterSignature, Reordered
from polymorph.events.types import WorkerRefused
from polymorph.events.values import EngineSettings, KernelBinding, Numerics, Revision, Way
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest
from polymorph.worker.adapters.artifacts import ArtifactFolder
from polymorph.worker.changing import Receipt
from polymorph.worker.convergence import Convergence
from polymorph.worker.domain.change import Plan
from polymorph.worker.faults import Fault, Faults
from polymorph.worker.leasing import HostLeasing
from polymorph.worker.service import NOTHING as NOTHING_IN_FORCE

KERNEL = Path(__file__).parents[1] / "engine" / "packed_gemm.cpp"
ABI = Path(__file__).parents[3] / "libs" / "polymorph" / "kernels" / "abi"
N, K = 48, 80
DEFINITION = f"gemm_n{N}_k{K}_f32"


_TESTED: set[tuple[str, str, int, int]] = set()
"""Kernels that passed their self-test, seconds of processor time each: most tests here ask for what comes after it."""


@functools.cache
def _built(source: str, *defines: str) -> bytes:
    flags = ["-O2", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
    flags += ["-fno-exceptions", "-fno-rtti", "-Wl,--hash-style=sysv", f"-I{ABI}", *defines]
    with tempfile.NamedTemporaryFile(suffix=".so") as target:
        compiler = ["g++", *flags, "-x", "c++", "-", "-o", target.name]
        subprocess.run(compiler, check=True, input=source.encode(), cwd=KERNEL.parent)
        return Path(target.name).read_bytes()


class AsAlways:
    """Settings that never change. `running` requests are in flight: nothing settles while there are any."""

    running = 0
    settlings = 0

    @contextlib.asynccontextmanager
    async def settled(self, waiting: Any) -> AsyncIterator[None]:
        del waiting
        self.settlings += 1
        if self.running:
            raise Retryable(f"{self.running} requests did not end")
        yield

    async def plan(self, revision: Revision, generation: int) -> Plan:
        return Plan(Way.NOTHING, generation, {}, (), (), EngineSettings(), None, "")

    async def live(self, plan: Plan) -> Receipt:
        return Receipt(EngineSettings(max_num_seqs=8), plan.way, 0.0)

    async def now(self) -> Receipt:
        return Receipt(EngineSettings(max_num_seqs=8), Way.NOTHING, 0.0)

    async def back_to(self, revision: Revision) -> Receipt:
        del revision
        return await self.now()

    async def read_back(self, engine: Any, revision: Revision) -> Receipt:
        del engine, revision
        return await self.now()

    def launch_of(self, revision: Revision) -> EngineLaunch:
        del revision
        return EngineLaunch(Path("m"))


class House:
    """A pool with its signers, and what they sign."""

    converging: asyncio.Task[None]
    disk_full = False
    tested = _TESTED

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = MemoryWorld()
        self.bus = InMemoryBus("/polymorph/test/0", SystemClock(), self.world)
        self.promoter = Signer.generate(folder / "p.pem")
        self.evaluator = Signer.generate(folder / "e.pem")
        self.trust = Trust()
        self.trust.add(self.promoter.public, Role.PROMOTER)
        self.trust.add(self.evaluator.public, Role.EVALUATOR)
        self.engine = OneLayer(N, K)
        self.changes = AsAlways()
        self.faults = Faults(folder / "faults.json", "p", "w", SystemClock())
        self.convergence = Convergence(
            "p",
            "w",
            Fence("p", self.trust, remember=self._remember),
            Seated(self.engine),
            self.changes,
            self.faults,
            self._loader,
            SystemClock(),
        )

    def _remember(self, generation: int) -> None:
        if self.disk_full:
            self.disk_full = False
            raise Retryable(f"generation {generation} cannot be kept")

    def _loader(self, bus: Any, engine: Any) -> Loader:
        return Loader(
            engine=engine,
            artifacts=ArtifactFolder(self.folder / "kernels", bus),
            trust=self.trust,
            hardware="here",
            isa=Isa.AVX2,
            scratch=self.folder / "selftest",
            libraries=Libraries(),
            tested=self.tested,
        )

    async def binding(
        self, *defines: str, source: Path = KERNEL, numerics: Numerics = Numerics.REORDERED
    ) -> KernelBinding:
        artifact = await self.bus.put_object(_built(source.read_text(), *defines))
        manifest = Manifest(
            artifact=artifact,
            definition=DEFINITION,
            definition_digest=definition_named(DEFINITION).digest(),
            solution="s",
            hardware="here",
            isa="GENERIC",
            toolchain="t",
            layout=None,
            numerics=numerics,
            min_m=1,
            max_m=8,
            evidence="e",
        )
        signed = await self.bus.put_object(sign_manifest(manifest, self.evaluator).canonical())
        return KernelBinding(
            definition=DEFINITION,
            min_m=1,
            max_m=8,
            manifest=signed,
            artifact=artifact,
            numerics=numerics,
        )

    async def desire(
        self, generation: int, *kernels: KernelBinding, reordered: Reordered = Reordered.AT_ONCE
    ) -> None:
        name = f"r{generation}" if kernels else "empty"
        state = DesiredState(
            pool="p",
            generation=generation,
            stable=Revision(revision=name, kernels=kernels),
            reordered=reordered,
        )
        await self.put(self.signed(state))

    def signed(self, state: DesiredState) -> DesiredState:
        signature = PromoterSignature(
            key_id=self.promoter.key_id, signature=self.promoter.sign(state.signed_content())
        )
        return state.model_copy(update={"signature": signature})

    async def put(self, state: DesiredState) -> None:
        await self.bus.kv_put(topology.DESIRED, "p", state.model_dump_json().encode())

    async def answer(self, generation: int) -> dict[str, Any]:
        async with asyncio.timeout(60):
            async for record in self.bus.events(after="0-0"):
                if isinstance(record, StreamRecord) and record.envelope.data.get("generation") == generation:
                    return {"type": record.envelope.type, **record.envelope.data}
        raise AssertionError("the stream ended")


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    made.converging = asyncio.create_task(made.convergence.run(made.bus))
    tasks = [asyncio.create_task(made.convergence.watch(made.bus)), made.converging]
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    made.engine.slots.clear()
    await made.bus.close()


async def test_loads_refuses_and_rolls_back(house: House) -> None:
    house.tested = set()
    kernel = await house.binding()
    await house.desire(1, kernel)
    loaded = await house.answer(1)
    assert loaded["type"] == "polymorph.evt.worker.loaded.v1", loaded
    assert loaded["served_calls"] == sum(loaded["served"].values()) > 0
    assert loaded["kernels"] == [kernel.artifact]
    assert not (house.folder / "selftest" / kernel.artifact).exists()

    crashing = house.folder / "crash.cpp"
    crashing.write_text(
        '#include "polymorph_kernel.h"\nextern "C" int32_t pm_run(const pm_context *, const pm_tensor *, '
        "int32_t, const pm_tensor *, int32_t) { __builtin_trap(); }\n"
    )
    await house.desire(2, await house.binding(source=crashing))
    refused = await house.answer(2)
    assert refused["type"] == "polymorph.evt.worker.refused.v1", refused
    assert "self-test" in refused["reason"]
    assert house.convergence.revision.revision == "r1"
    assert [binding.artifact for binding in house.engine.slots.engaged] == [kernel.artifact]

    before = await house.convergence.switch(empty=True, ttl_s=0.2)
    assert house.engine.slots.engaged == []
    await house.engine.exercise(1)
    async with asyncio.timeout(5):
        while not house.engine.slots.engaged:
            await asyncio.sleep(0.02)
    await house.engine.exercise(1)
    assert await house.convergence.switch(empty=False, ttl_s=1) == before + 1

    await house.desire(3)
    back = await house.answer(3)
    assert (back["revision"], back["kernels"]) == ("empty", [])
    assert house.engine.slots.engaged == []


def _engaged(house: House) -> list[str]:
    return [binding.artifact for binding in house.engine.slots.engaged]


async def _until_engaged(house: House, *artifacts: str) -> None:
    async with asyncio.timeout(10):
        while _engaged(house) != list(artifacts):
            await asyncio.sleep(0.02)


async def test_a_retreat_while_the_engine_is_silent_empties_the_slots(house: House) -> None:
    counters = house.engine.counters
    silent = asyncio.Event()

    async def silent_once_engaged() -> Counters:
        if not house.engine.slots.engaged:
            return await counters()
        silent.set()
        raise Retryable("the engine does not answer")

    house.engine.counters = silent_once_engaged  # type: ignore[method-assign]
    await house.desire(1, await house.binding())
    async with asyncio.timeout(60):
        await silent.wait()
    await house.desire(2)
    assert (await house.answer(2))["revision"] == "empty"
    assert _engaged(house) == []


async def test_a_load_that_is_cut_off_goes_back_to_what_is_loaded(house: House) -> None:
    """As when the bus is lost: convergence ends with the new kernel engaged, and may not begin again for long."""
    exercised = asyncio.Event()

    async def never(_: int) -> None:
        if house.engine.slots.engaged:
            exercised.set()
            await asyncio.Event().wait()
        else:
            house.engine.slots.ops.linear(torch.randn(1, K), None, house.engine.layer, N)

    house.engine.exercise = never  # type: ignore[method-assign]
    await house.desire(1, await house.binding())
    async with asyncio.timeout(60):
        await exercised.wait()
    house.converging.cancel()
    await _until_engaged(house)


async def test_emptied_slots_come_back_however_often_the_engine_is_silent(house: House) -> None:
    kernel = await house.binding()
    await house.desire(1, kernel)
    assert (await house.answer(1))["type"] == "polymorph.evt.worker.loaded.v1"
    engage = house.engine.engage
    silences = 0

    async def silent(bindings: Any, *, keep_packed: bool = False) -> Engaged:
        nonlocal silences
        if silences:
            silences -= 1
            raise Retryable("the engine does not answer")
        return await engage(bindings, keep_packed=keep_packed)

    house.engine.engage = silent  # type: ignore[method-assign]
    await house.convergence.switch(empty=True, ttl_s=0.05)
    silences = 2
    await _until_engaged(house, kernel.artifact)
    for empty in (True, False):
        await house.convergence.switch(empty=True, ttl_s=0.05)
        silences = 1
        with pytest.raises(Retryable):
            await house.convergence.switch(empty=empty, ttl_s=0.05)
        await _until_engaged(house, kernel.artifact)


async def test_emptied_slots_come_back_while_a_load_fails(house: House) -> None:
    kernel = await house.binding()
    await house.desire(1, kernel)
    assert (await house.answer(1))["type"] == "polymorph.evt.worker.loaded.v1"
    await house.convergence.switch(empty=True, ttl_s=0.5)
    missing = await house.binding("-DREFUSES_ABOVE=4")
    house.world.objects[topology.ARTIFACTS].pop(missing.artifact)
    await house.desire(2, missing)
    await _until_engaged(house, kernel.artifact)


async def test_a_generation_that_cannot_be_kept_is_loaded_once_it_can(house: House) -> None:
    await house.desire(1, await house.binding())
    assert (await house.answer(1))["type"] == "polymorph.evt.worker.loaded.v1"
    house.disk_full = True
    await house.desire(2)
    assert (await house.answer(2))["revision"] == "empty"
    assert not house.disk_full


async def test_a_kernel_that_traffic_of_other_sizes_hides_stays(house: House) -> None:
    async def crowded(_: int) -> None:
        house.engine.slots.ops.linear(torch.randn(6, K), None, house.engine.layer, N)

    kernel = (await house.binding()).model_copy(update={"max_m": 1})
    house.engine.exercise = crowded  # type: ignore[method-assign]
    await house.desire(1, kernel)
    loaded = await house.answer(1)
    assert loaded["type"] == "polymorph.evt.worker.loaded.v1", loaded
    assert loaded["served_calls"] == 0
    assert [binding.artifact for binding in house.engine.slots.engaged] == [kernel.artifact]


async def test_a_kernel_that_its_own_calls_pass_by_is_refused(house: House) -> None:
    async def not_at_all(bindings: Any, *, keep_packed: bool = False) -> Engaged:
        return Engaged(0.001, house.engine.counted())

    house.engine.engage = not_at_all  # type: ignore[method-assign]
    await house.desire(1, await house.binding())
    refused = await house.answer(1)
    assert refused["type"] == "polymorph.evt.worker.refused.v1", refused
    assert "served none of" in refused["reason"]


async def test_a_wrong_kernel_is_refused_by_the_self_test(house: House) -> None:
    await house.desire(1, await house.binding("-DTIMES=1.01f"))
    refused = await house.answer(1)
    assert refused["type"] == "polymorph.evt.worker.refused.v1", refused
    assert "against float64" in refused["reason"]


async def test_an_artifact_that_is_not_there_yet_is_tried_again(house: House) -> None:
    kernel = await house.binding()
    content = house.world.objects[topology.ARTIFACTS].pop(kernel.artifact)
    await house.desire(1, kernel)
    await asyncio.sleep(0.8)
    assert house.convergence.revision.revision == "empty"
    house.world.objects[topology.ARTIFACTS][kernel.artifact] = content
    assert (await house.answer(1))["type"] == "polymorph.evt.worker.loaded.v1"


async def test_a_kernel_whose_quarantine_is_lifted_is_tried_without_a_new_generation(house: House) -> None:
    watching = asyncio.create_task(house.faults.watch(house.bus))
    kernel = await house.binding()
    await house.bus.kv_put(topology.QUARANTINE, kernel.artifact, b"{}")
    await house.desire(1, kernel)
    assert "quarantine" in (await _told(house, "refused", 1))["reason"]
    await house.bus.kv_delete(topology.QUARANTINE, kernel.artifact)
    assert (await _told(house, "loaded", 1))["kernels"] == [kernel.artifact]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


class Beside(AsAlways):
    """Another engine for each revision but the one that it was made for last."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.may = asyncio.Event()
        self.moves: list[str] = []
        self.refuses = ""

    async def plan(self, revision: Revision, generation: int) -> Plan:
        way = Way.NOTHING if self.moves[-1:] == [revision.revision] else Way.ENGINE
        return Plan(way, generation, {}, (), (), EngineSettings(), None, "another block size")

    async def beside(self, plan: Plan, revision: str, engage_on: Any, waiting: Any) -> Receipt:
        del waiting
        await self.may.wait()
        if self.refuses:
            raise Refused(self.refuses)
        await engage_on(self.engine)
        self.moves.append(revision)
        return Receipt(EngineSettings(block_size=32), plan.way, 0.0)


async def test_a_new_engine_is_not_given_up_because_the_bus_is_lost(house: House) -> None:
    changes = Beside(house.engine)
    house.convergence._changes = changes  # type: ignore[assignment]
    kernel = await house.binding()
    await house.desire(1, kernel)
    async with asyncio.timeout(30):
        while house.convergence._moving is None:
            await asyncio.sleep(0.01)
    assert house.convergence.standing.locked()
    house.converging.cancel()
    await asyncio.gather(house.converging, return_exceptions=True)
    again = asyncio.create_task(house.convergence.run(house.bus))
    await asyncio.sleep(0.05)
    changes.may.set()
    event = await house.answer(1)
    again.cancel()
    assert (event["type"], event["way"]) == ("polymorph.evt.worker.loaded.v1", "engine")
    assert event["settings"] == {"block_size": 32}
    assert event["kernels"] == [kernel.artifact]
    assert changes.moves == ["r1"]


async def test_it_ends_where_it_is_cancelled_though_it_cleans_up_with_an_error(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the bus is lost: whoever waits for it would not connect again."""
    begun, errors = asyncio.Event(), [Retryable("the engine does not answer")]

    async def converge(bus: Any) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            if errors:
                raise errors.pop()

    monkeypatch.setattr(house.convergence, "_converge", converge)
    running = asyncio.create_task(house.convergence.run(house.bus))
    async with asyncio.timeout(10):
        await begun.wait()
        running.cancel()
        await asyncio.wait({running})


async def test_pauses_are_refused_while_an_engine_is_being_changed(house: House) -> None:
    changes = Beside(house.engine)
    house.convergence._changes = changes  # type: ignore[assignment]
    leasing = HostLeasing(
        "p", "w", Seated(house.engine), SystemClock(), lambda: False, house.convergence.standing
    )
    lease = LeaseHost(worker_id="w", lease_id="a", burst_s=0.2)
    assert (await leasing.ask(lease)).granted
    await house.desire(1, await house.binding())
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        while house.convergence._moving is None or leasing._burst is not None:
            await asyncio.sleep(0.01)
        while not house.convergence.standing.locked():
            await asyncio.sleep(0.01)
    refused = await leasing.ask(lease)
    assert (refused.granted, refused.reason) == (False, "the engine is being changed; ask again")
    assert not house.engine.paused
    changes.refuses = "it does not start"
    changes.may.set()
    event = await house.answer(1)
    assert (event["type"], event["reason"]) == ("polymorph.evt.worker.refused.v1", "it does not start")
    assert (await leasing.ask(lease)).granted
    await leasing.close(None)


async def test_bursts_end_by_themselves_and_are_reported(house: House) -> None:
    leasing = HostLeasing("p", "w", Seated(house.engine), SystemClock(), lambda: True)
    watching = asyncio.create_task(leasing.watch(house.bus))
    assert (await leasing.ask(LeaseHost(worker_id="w", lease_id="a", burst_s=0.3))).granted
    assert house.engine.paused
    assert not (await leasing.ask(LeaseHost(worker_id="w", lease_id="b", burst_s=0.1))).granted
    ended = await leasing.ask(LeaseHost(worker_id="w", lease_id="a", burst_s=0.1, release=True))
    assert ended.paused_s < 0.3
    assert not house.engine.paused
    assert (await leasing.ask(LeaseHost(worker_id="w", lease_id="a", burst_s=0.05))).granted
    async with asyncio.timeout(2):
        while house.engine.paused:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        async for record in house.bus.events(after="0-0"):
            if isinstance(record, StreamRecord) and "lease_id" in record.envelope.data:
                break
    watching.cancel()
    assert record.envelope.data["bursts"] == 2
    assert 0.05 <= record.envelope.data["stolen_s"] < 1.0


async def test_a_lease_that_another_follows_at_once_is_reported_too(house: House) -> None:
    leasing = HostLeasing("p", "w", Seated(house.engine), SystemClock(), lambda: False)
    for lease_id in ("a", "b"):
        assert (await leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3))).granted
        await leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3, release=True))
    await leasing.close(house.bus)
    told: list[str] = []
    async with asyncio.timeout(10):
        async for record in house.bus.events(after="0-0"):
            if isinstance(record, StreamRecord) and "lease_id" in record.envelope.data:
                told.append(record.envelope.data["lease_id"])
            if len(told) == 2:
                break
    assert told == ["a", "b"]


async def test_a_lease_that_cannot_be_told_keeps_no_other_from_being(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def limited(message: Any) -> int:
        if len(message.lease_id) > 1000:
            raise Poison("larger than the server's payload limit")
        told.append(message.lease_id)
        return 1

    monkeypatch.setattr(house.bus, "publish", limited)
    leasing = HostLeasing("p", "w", Seated(house.engine), SystemClock(), lambda: False)
    for lease_id in ("a" * 2000, "b"):
        assert (await leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3))).granted
        await leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3, release=True))
    await leasing.close(house.bus)
    assert told == ["b"]


async def test_one_lease_has_the_host_though_both_ask_while_it_breathes(house: House) -> None:
    leasing = HostLeasing("p", "w", Seated(house.engine), SystemClock(), lambda: True)

    def ask(lease_id: str, *, release: bool = False) -> Any:
        return leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3, release=release))

    assert (await ask("a")).granted
    await asyncio.sleep(0.1)
    await ask("a", release=True)
    again = asyncio.create_task(ask("a"))
    await asyncio.sleep(0)
    first, second, released = await asyncio.gather(again, ask("b"), ask("b", release=True))
    assert (first.granted, second.granted) == (True, False)
    assert second.reason == "lease a has the host"
    assert not released.granted
    await ask("b", release=True)
    assert house.engine.paused
    await ask("a", release=True)
    assert not house.engine.paused


def test_slot_bindings_are_plain_values() -> None:
    binding = SlotBinding(DEFINITION, 1, 8, "/x.so", "a")
    assert SlotBinding.of(vars(binding)) == binding


async def test_a_desired_state_that_cannot_be_read_is_told_once_and_the_next_good_one_is_loaded(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    publish = house.bus.publish

    async def listening(message: Any) -> int:
        if isinstance(message, WorkerRefused):
            assert message.generation == -1
            told.append(message.reason)
        return await publish(message)

    monkeypatch.setattr(house.bus, "publish", listening)
    kernel = await house.binding()
    await house.desire(1, kernel)
    await house.answer(1)
    bad = (b"\xff{", b"\xff{", b'{"pool": "p", "generation": "many"}', b"[]")
    for value, count in zip(bad, (1, 1, 2, 3), strict=True):
        await house.bus.kv_put(topology.DESIRED, "p", value)
        async with asyncio.timeout(60):
            while len(told) < count:
                await asyncio.sleep(0.01)
        assert _engaged(house) == [kernel.artifact]
    await house.desire(2)
    assert (await house.answer(2))["kernels"] == []
    assert _engaged(house) == []
    assert len(told) == 3
    assert all("right would be a DesiredState in JSON" in reason for reason in told)
    assert "generation: Input should be a valid integer" in told[1]


async def test_an_unsigned_state_takes_no_kernel_away_and_locks_nothing_out(house: House) -> None:
    first, second = await house.binding("-DREFUSES_ABOVE=11"), await house.binding("-DREFUSES_ABOVE=12")
    await house.desire(1, first)
    await _told(house, "loaded", 1)
    await house.put(DesiredState(pool="p", generation=10**15))
    assert "is not signed" in (await _told(house, "refused", 10**15))["reason"]
    assert _engaged(house) == [first.artifact]
    await house.desire(2, second)
    await _told(house, "loaded", 2)
    assert _engaged(house) == [second.artifact]


@pytest.mark.parametrize("signed", [False, True])
async def test_a_refusal_too_large_for_an_event_is_told_cut_and_the_next_state_is_heard(
    house: House, monkeypatch: pytest.MonkeyPatch, *, signed: bool
) -> None:
    publish = house.bus.publish

    async def limited(message: Any) -> int:
        if len(message.model_dump_json()) > MAX_PAYLOAD_BYTES:
            raise Poison("larger than the server's payload limit")
        return await publish(message)

    monkeypatch.setattr(house.bus, "publish", limited)
    kernel = await house.binding()
    state = DesiredState(
        pool="p", generation=1, stable=Revision(revision="n" * MAX_PAYLOAD_BYTES, kernels=(kernel,))
    )
    await house.put(house.signed(state) if signed else state)
    refused = await _told(house, "refused", 1)
    assert refused["revision"] == f"{'n' * 200}... ({MAX_PAYLOAD_BYTES} characters)"
    assert ("has at most 200" if signed else "is not signed") in refused["reason"]
    await house.desire(2, kernel)
    await _told(house, "loaded", 2)


async def test_what_can_never_be_told_is_told_in_the_log_alone(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish = house.bus.publish

    async def takes_no_refusal(message: Any) -> int:
        if isinstance(message, WorkerRefused):
            raise Poison("never")
        return await publish(message)

    monkeypatch.setattr(house.bus, "publish", takes_no_refusal)
    await house.put(DesiredState(pool="p", generation=1))
    await house.desire(2, await house.binding())
    await _told(house, "loaded", 2)
    assert "this cannot be told: never" in caplog.text


async def test_a_lossy_kernel_waits_until_no_request_runs_and_salts_the_cache(house: House) -> None:
    house.changes.running = 1
    lossy = await house.binding(numerics=Numerics.LOSSY)
    await house.desire(1, lossy)
    async with asyncio.timeout(60):
        while not house.changes.settlings:
            await asyncio.sleep(0.01)
    assert house.engine.slots.engaged == []
    house.changes.running = 0
    loaded = await house.answer(1)
    assert loaded["kernels"] == [lossy.artifact]
    (salt,) = house.engine.salts
    assert salt is not None
    settled = house.changes.settlings
    await house.desire(2)
    assert (await house.answer(2))["kernels"] == []
    assert house.engine.salts == [salt, None]
    assert house.changes.settlings > settled


async def test_a_lossy_kernel_that_fails_is_taken_back_before_requests_come(house: House) -> None:
    order: list[str] = []
    broken = await house.binding("-DREFUSES_EXACTLY=5", numerics=Numerics.LOSSY)

    async def five_rows(m: int) -> None:
        del m
        house.engine.slots.ops.linear(torch.randn(5, K), None, house.engine.layer, N)

    house.engine.exercise = five_rows  # type: ignore[method-assign]

    @contextlib.asynccontextmanager
    async def settled(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            order.append(f"newcomers with {len(house.engine.slots.engaged)} kernels")

    house.changes.settled = settled  # type: ignore[method-assign]
    await house.desire(1, broken)
    refused = await house.answer(1)
    assert "gave errors while serving" in refused["reason"]
    assert order == ["newcomers with 0 kernels"]


async def test_a_salt_whose_answer_was_lost_is_taken_back_too(house: House) -> None:
    take, lost = house.engine.salt, [True]

    async def unanswered(revision: str | None) -> None:
        await take(revision)
        if lost:
            lost.pop()
            raise Retryable("the engine does not answer")

    house.engine.salt = unanswered  # type: ignore[method-assign]
    await house.desire(1, await house.binding(numerics=Numerics.LOSSY))
    await house.answer(1)
    first, second, third = house.engine.salts
    assert second is None
    assert first == third


async def test_a_lossy_kernel_whose_load_is_cut_off_is_taken_back_before_requests_come(house: House) -> None:
    order: list[str] = []
    serving = asyncio.Event()

    async def for_ever(m: int) -> None:
        del m
        serving.set()
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def settled(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            order.append(
                f"newcomers with {len(house.engine.slots.engaged)} kernels, salted {house.engine.salts}"
            )

    lossy = await house.binding(numerics=Numerics.LOSSY)
    house.changes.settled = settled  # type: ignore[method-assign]
    house.tested.add((lossy.artifact, DEFINITION, lossy.min_m, lossy.max_m))
    house.engine.exercise = for_ever  # type: ignore[method-assign]
    await house.desire(1, lossy)
    async with asyncio.timeout(60):
        await serving.wait()
    assert len(house.engine.slots.engaged) == 1
    house.converging.cancel()
    await asyncio.gather(house.converging, return_exceptions=True)
    assert house.converging.cancelled()
    assert order == ["newcomers with 0 kernels, salted []"]


async def test_an_error_that_nobody_foresaw_ends_one_try_of_converging_and_of_going_back(
    house: House,
) -> None:
    kernel = await house.binding()
    await house.desire(1, kernel)
    assert (await house.answer(1))["kernels"] == [kernel.artifact]
    engage, failing = house.engine.engage, [1, 1]

    async def fails(bindings: Any, *, keep_packed: bool = False) -> Engaged:
        if failing and bindings:
            failing.pop()
            raise KeyError("nobody foresaw it")
        return await engage(bindings, keep_packed=keep_packed)

    house.engine.engage = fails  # type: ignore[method-assign]
    await house.convergence.switch(empty=True, ttl_s=0.05)
    await _until_engaged(house, kernel.artifact)
    failing.append(1)
    other = await house.binding("-DREFUSES_ABOVE=9")
    await house.desire(2, other)
    assert (await house.answer(2))["kernels"] == [other.artifact]
    assert failing == []


@pytest.mark.parametrize("changing", [False, True])
async def test_a_new_engine_waits_for_no_self_test_and_not_long_for_a_change(
    house: House, changing: bool
) -> None:
    kernel = await house.binding()
    await house.desire(1, kernel)
    assert (await house.answer(1))["kernels"] == [kernel.artifact]
    testing = asyncio.Event()

    async def for_ever(*_: Any, **__: Any) -> None:
        testing.set()
        await asyncio.Event().wait()

    house.engine.capture = for_ever  # type: ignore[method-assign]
    untested = await house.binding("-DREFUSES_ABOVE=3333")
    await house.desire(2, untested)
    async with asyncio.timeout(60):
        await testing.wait()
    house.convergence.retreat()
    house.engine.slots.engage([])  # as a new engine is
    if changing:
        async with house.convergence.standing:
            with pytest.raises(Retryable, match="another change"):
                await house.convergence.restore(cast("Any", house.engine))
        assert _engaged(house) == []
        return
    async with asyncio.timeout(30):
        assert (
            await house.convergence.restore(cast("Any", house.engine)) == house.convergence.revision.revision
        )
    assert _engaged(house) == [kernel.artifact]


async def test_a_switch_that_waited_for_another_engine_runs_what_is_loaded_then(house: House) -> None:
    await house.desire(1, await house.binding())
    assert (await house.answer(1))["type"] == "polymorph.evt.worker.loaded.v1"
    async with house.convergence.standing:
        switching = asyncio.create_task(house.convergence.switch(empty=False, ttl_s=30))
        await asyncio.sleep(0.05)
        house.convergence.service.loaded = NOTHING_IN_FORCE  # as after a death under it
    await switching
    assert _engaged(house) == []


async def test_who_retreats_while_a_new_engine_is_made_ready_is_heeded(house: House) -> None:
    kernel = await house.binding()
    await house.desire(1, kernel)
    assert (await house.answer(1))["kernels"] == [kernel.artifact]
    engage = house.engine.engage

    async def left_meanwhile(bindings: Any, *, keep_packed: bool = False) -> Engaged:
        house.engine.engage = engage  # type: ignore[method-assign]
        house.faults.leave(house.convergence.revision.revision, "engines died under it")
        house.convergence.retreat()
        return await engage(bindings, keep_packed=keep_packed)

    house.engine.engage = left_meanwhile  # type: ignore[method-assign]
    await house.convergence.restore(cast("Any", house.engine))
    await _until_engaged(house)
    assert house.convergence.revision.revision == "empty"


async def test_a_lossy_revision_is_not_switched(house: House) -> None:
    await house.desire(1, await house.binding(numerics=Numerics.LOSSY))
    await house.answer(1)
    with pytest.raises(Refused, match="two numerics"):
        await house.convergence.switch(empty=True, ttl_s=1.0)


@pytest.mark.parametrize(
    ("reordered", "settles"), [(Reordered.AT_ONCE, False), (Reordered.NEW_REQUESTS, True)]
)
async def test_reordered_kernels_come_as_the_pool_says(
    house: House, reordered: Reordered, settles: bool
) -> None:
    await house.desire(1, await house.binding(), reordered=reordered)
    await house.answer(1)
    assert bool(house.changes.settlings) is settles
    assert house.engine.salts == []


async def test_what_crashed_here_is_left_for_what_served_before_and_not_taken_again(house: House) -> None:
    good, bad = await house.binding("-DREFUSES_ABOVE=11"), await house.binding("-DREFUSES_ABOVE=12")
    await house.desire(1, good)
    await _told(house, "loaded", 1)
    await house.desire(2, bad)
    await _told(house, "loaded", 2)
    work = house.convergence.at_work(bad.artifact)
    assert (work.generation, work.definition, work.leavable) == (2, DEFINITION, True)
    assert house.convergence.at_work(None).revision == work.revision
    house.faults.add(_fault(bad.artifact, work.revision))
    house.convergence.retreat()
    assert [each.artifact for each in house.convergence.loaded.bindings] == [good.artifact]
    assert await house.convergence.restore(house.engine) == house.convergence.revision.revision  # type: ignore[arg-type]
    assert _engaged(house) == [good.artifact]
    assert "in quarantine" in (await _told(house, "refused", 2))["reason"]
    assert _engaged(house) == [good.artifact]


async def test_a_kernel_that_comes_into_quarantine_is_dropped_at_once(house: House) -> None:
    good, bad = await house.binding("-DREFUSES_ABOVE=11"), await house.binding("-DREFUSES_ABOVE=12")
    await house.desire(1, good)
    await _told(house, "loaded", 1)
    await house.desire(2, bad)
    await _told(house, "loaded", 2)
    watching = asyncio.create_task(house.faults.watch(house.bus))
    await house.bus.kv_put(topology.QUARANTINE, bad.artifact, b"it crashed elsewhere")
    await _until_engaged(house, good.artifact)
    watching.cancel()


async def test_a_revision_that_was_left_is_refused_with_the_reason(house: House) -> None:
    kernel = await house.binding("-DREFUSES_ABOVE=11")
    house.faults.leave("r1", "3 engines died under it")
    await house.desire(1, kernel)
    assert (await _told(house, "refused", 1))["reason"] == "3 engines died under it"


def _fault(artifact: str, revision: str) -> Fault:
    return Fault(
        artifact=artifact,
        definition=DEFINITION,
        how="crash",
        evidence="It ended inside call 3.",
        revision=revision,
        generation=2,
        at=SystemClock().now(),
    )


async def _told(house: House, kind: str, generation: int) -> dict[str, Any]:
    async with asyncio.timeout(60):
        async for record in house.bus.events(after="0-0"):
            if isinstance(record, StreamRecord) and record.envelope.type.split(".")[3] == kind:
                data: dict[str, Any] = record.envelope.data
                if data["generation"] == generation:
                    return data
    raise AssertionError("the stream ended")
