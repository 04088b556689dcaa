"""A plain server brings its engine to what its folder says; the engine here only takes notes."""

import asyncio
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polymorph.bus.errors import Retryable
from polymorph.config.clock import SystemClock
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.flight import FlightRecord, in_flight, rank_of_all
from polymorph.engine.loading.admission import Fence, Refused
from polymorph.engine.plain import front, server, watch
from polymorph.engine.plain.folder import KernelFolder, NotThere
from polymorph.engine.plain.patience import again_s
from polymorph.engine.plain.settings import PlainSettings
from polymorph.engine.plain.watch import Watch
from polymorph.engine.provenance import RUNNING
from polymorph.events.state import DesiredState, PromoterSignature
from polymorph.events.values import EngineSettings, KernelBinding, Numerics, Revision
from polymorph.kernels.signing import Role, Signer, Trust

DEFINITION = "gemm_n512_k256_f32"


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class Notes:
    """An engine of two ranks, and the loader for it."""

    alive = True

    def __init__(self) -> None:
        self.engine = self
        self.runs: list[str] = []
        self.silent = False
        self.fault: Exception | None = None
        self.epoch = 0
        self.quarantined: set[str] = set()
        self.prepared = 0

    async def prepare(self, revision: Revision, quarantined: set[str]) -> tuple[SlotBinding, ...]:
        self.quarantined = quarantined
        self.prepared += 1
        if quarantined:
            raise Refused(f"{min(quarantined)[:12]} is in quarantine")
        if self.fault is not None:
            raise self.fault
        return tuple(
            SlotBinding(kernel.definition, kernel.min_m, kernel.max_m, "path", kernel.artifact)
            for kernel in revision.kernels
        )

    async def engage(self, *given: Any) -> Any:
        """As a loader it is given a revision first, and reads back; as an engine bindings alone."""
        if self.silent:
            raise Retryable("the engine does not answer")
        self.epoch += 1
        self.runs = [binding.artifact for binding in given[-1]]
        if len(given) == 2 and digest("lame") in self.runs:
            raise Refused("lame served none of 9 calls")
        return None

    async def describe(self) -> list[dict[str, Any]]:
        engaged = [
            {"definition": DEFINITION, "min_m": 1, "max_m": 8, "artifact": artifact} for artifact in self.runs
        ]
        return [{"engaged": engaged, "missing": {"rms_norm": "gone"}}] * 2

    async def read(self) -> list[dict[str, Any]]:
        tally = {"calls": 3, "ns": 1}
        counts: Mapping[str, Any] = {"by_m": {"8": tally}}
        served = {artifact: {"served": tally, "by_m": {"8": tally}, "errors": 0} for artifact in self.runs}
        return [{"epoch": self.epoch, "definitions": {DEFINITION: counts}, "artifacts": served}] * 2


class House:
    def __init__(self, folder: Path) -> None:
        self.signer = Signer.generate(folder / "p.pem")
        trust = Trust()
        trust.add(self.signer.public, Role.PROMOTER)
        self.folder = KernelFolder(folder)
        self.notes = Notes()
        loader: Any = self.notes
        self.watch = Watch("p", "here", self.folder, Fence("p", trust), loader, SystemClock())

    def desire(self, generation: int, *artifacts: str, pool: str = "p", **more: Any) -> None:
        numerics, named = more.pop("numerics", Numerics.REORDERED), more.pop("named", False)
        kernels = tuple(
            KernelBinding(
                definition=DEFINITION,
                min_m=1,
                max_m=8,
                manifest=digest("m"),
                artifact=name if named else digest(name),
                numerics=numerics,
            )
            for name in artifacts
        )
        revision = Revision(revision="-".join(artifacts) or "empty", kernels=kernels, **more)
        state = DesiredState(pool=pool, generation=generation, stable=revision)
        signature = PromoterSignature(
            key_id=self.signer.key_id, signature=self.signer.sign(state.signed_content())
        )
        self.folder.desire(state.model_copy(update={"signature": signature}))

    async def step(self) -> tuple[str, str, str]:
        await self.watch.step()
        status = self.folder.status()
        assert status is not None
        return status.state, status.revision, status.reason


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(RUNNING, "revision", "empty")
    return House(tmp_path)


async def test_it_comes_to_what_is_desired_and_says_so(house: House) -> None:
    assert await house.step() == ("converged", "empty", "")
    house.desire(1, "a")
    assert await house.step() == ("converged", "a", "")
    assert (house.notes.runs, RUNNING.revision) == ([digest("a")], "a")
    status = house.folder.status()
    assert status is not None
    assert (status.generation, status.ranks, status.missing) == (1, 2, {"rms_norm": "gone"})
    assert status.slots == {DEFINITION: {"8": 6}}
    assert [(kernel.artifact, kernel.served_calls, kernel.by_m) for kernel in status.kernels] == [
        (digest("a"), 6, {"8": 6})
    ]
    epoch = house.notes.epoch
    await house.step()
    assert house.notes.epoch == epoch  # what runs already is not engaged again
    house.desire(2)
    assert await house.step() == ("converged", "empty", "")
    assert house.notes.runs == []


async def test_what_may_not_be_believed_is_refused_once_and_what_ran_goes_on(house: House) -> None:
    house.desire(5, "a")
    await house.step()
    house.desire(4, "b")
    assert await house.step() == ("refused", "a", "generation 4 is older than 5, which was seen")
    house.desire(5, "b")
    reason = "generation 5 says something else than when it was admitted"
    assert await house.step() == ("refused", "a", reason)
    house.desire(6, "b", pool="q")
    assert await house.step() == ("refused", "a", "the desired state is for pool q, this is p")
    house.folder.desired_path.write_text("{}")
    state, revision, reason = await house.step()
    assert (state, revision, "is no desired state" in reason) == ("refused", "a", True)
    await house.step()
    status = house.folder.status()
    assert status is not None
    assert [refusal.generation for refusal in status.refusals] == [4, 5, 6, -1]
    house.desire(7, "b")
    assert await house.step() == ("converged", "b", "")


async def test_an_unsigned_state_takes_no_kernel_away_and_locks_nothing_out(house: House) -> None:
    house.desire(1, "a")
    await house.step()
    house.folder.desire(DesiredState(pool="p", generation=10**15))
    assert await house.step() == ("refused", "a", f"generation {10**15} is not signed by a promoter")
    house.desire(2, "b")
    assert await house.step() == ("converged", "b", "")


async def test_a_status_stays_short_enough_to_be_read(house: House) -> None:
    for generation in range(1, 4):
        named = Revision(revision=str(generation) * 900_000)
        house.folder.desire(DesiredState(pool="p", generation=generation, stable=named))
        await house.step()
    status = house.folder.status()
    assert status is not None
    assert [refusal.revision[200:] for refusal in status.refusals] == ["... (900000 characters)"] * 3


async def test_a_plain_server_changes_kernels_alone(house: House) -> None:
    house.desire(1, "a", engine=EngineSettings(max_num_seqs=4))
    state, revision, reason = await house.step()
    assert (state, revision, "changes kernels alone" in reason) == ("refused", "empty", True)
    house.desire(3, "../status.json", named=True)
    state, revision, reason = await house.step()
    assert (state, revision, "it is named by its sha256" in reason) == ("refused", "empty", True)
    house.desire(4, "a", numerics=Numerics.LOSSY)
    state, revision, reason = await house.step()
    assert (state, revision, "which takes a worker" in reason) == ("refused", "empty", True)


async def test_a_kernel_that_does_not_serve_is_taken_back(house: House) -> None:
    house.desire(1, "a")
    await house.step()
    house.desire(2, "lame")
    assert await house.step() == ("refused", "a", "lame served none of 9 calls")
    assert house.notes.runs == [digest("a")]
    epoch = house.notes.epoch
    assert await house.step() == ("refused", "a", "lame served none of 9 calls")
    assert house.notes.epoch == epoch  # it is not tried again


async def test_it_waits_for_files_and_for_the_engine(house: House) -> None:
    await house.step()
    house.desire(1, "a")
    house.notes.fault = NotThere("0000.so cannot be read: No such file or directory")
    assert await house.step() == ("waiting", "empty", str(house.notes.fault))
    house.notes.fault = None
    house.notes.silent = True
    assert await house.step() == ("waiting", "empty", "the engine does not answer")
    house.notes.silent = False
    assert await house.step() == ("converged", "a", "")


async def test_an_engine_that_ended_in_a_kernel_does_not_load_it_again(house: House, tmp_path: Path) -> None:
    artifact = "ab" * 32
    flights = tmp_path / "flight"
    flights.mkdir()
    with FlightRecord(flights, 0) as record:
        record.begin(artifact, 1, 5)
    server._quarantine(house.folder, server.OwnFlights(flights, front_of(0)))
    assert house.folder.quarantined({artifact, "cd" * 32}) == {artifact}
    assert list(flights.iterdir()) == []
    house.desire(1, artifact, named=True)
    await house.step()
    assert house.notes.quarantined == {artifact}


async def test_a_kernel_whose_quarantine_is_lifted_is_tried_with_the_next_look(house: House) -> None:
    for name in ("a", "b"):
        house.folder.quarantine(digest(name), "the engine ended")
    house.desire(1, "a", "b")
    first, second = sorted(digest(name) for name in ("a", "b"))
    for _ in range(3):
        assert await house.step() == ("refused", "empty", f"{first[:12]} is in quarantine")
    assert house.notes.prepared == 1
    (house.folder.quarantine_path / first).unlink()
    for _ in range(3):
        assert await house.step() == ("refused", "empty", f"{second[:12]} is in quarantine")
    assert house.notes.prepared == 2
    (house.folder.quarantine_path / second).unlink()
    assert await house.step() == ("converged", "a-b", "")
    assert house.notes.prepared == 3


async def test_a_lifted_kernel_is_tried_though_the_engine_is_silent_first(house: House) -> None:
    house.folder.quarantine(digest("a"), "the engine ended")
    house.desire(1, "a")
    await house.step()
    (house.folder.quarantine_path / digest("a")).unlink()
    house.notes.fault = Retryable("the engine does not answer")
    assert await house.step() == ("waiting", "empty", "the engine does not answer")
    house.notes.fault = None
    assert await house.step() == ("converged", "a", "")


@pytest.mark.parametrize("died", [True, False])
def test_an_engine_that_is_ended_in_a_kernel_did_not_die_of_it(died: bool, tmp_path: Path) -> None:
    ended: list[Any] = []
    llm: Any = SimpleNamespace(errored=died, shutdown=lambda **named: ended.append(named["timeout"]))
    departure = server.Departure(llm, server.OwnFlights(tmp_path, front_of(0)))
    with FlightRecord(tmp_path, 0) as record:
        record.begin("ab" * 32, 1, 5)
        llm.shutdown(timeout=3)
        llm.errored = True
        assert ended == [3]
        assert departure.meant is not died
        assert bool(in_flight(tmp_path)) is died


def front_of(*engines: int, world: int = 1) -> Any:
    """A front of these data-parallel engines, of `world` ranks each."""
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_ranks_managed=list(engines)),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=world)),
    )


def test_of_several_engines_over_one_folder_each_front_blames_its_own_kernels(
    house: House, tmp_path: Path
) -> None:
    flights = tmp_path / "flight"
    flights.mkdir()
    mine, others = "ab" * 32, "cd" * 32
    with FlightRecord(flights, 1) as one, FlightRecord(flights, 2) as two:
        one.begin(others, 1, 5)
        two.begin(mine, 1, 5)
        server._quarantine(house.folder, server.OwnFlights(flights, front_of(1, world=2)))
        assert house.folder.quarantined({mine, others}) == {mine}
        assert [each.name for each in flights.iterdir()] == ["rank-1.flight"]
        server._quarantine(house.folder, server.OwnFlights(flights, front_of(0, world=2)))
    assert house.folder.quarantined({mine, others}) == {mine, others}


def test_ranks_count_on_over_data_parallel_engines() -> None:
    parallel = SimpleNamespace(data_parallel_index=2, world_size=4)
    assert rank_of_all(SimpleNamespace(parallel_config=parallel, rank=3)) == 11
    assert rank_of_all(SimpleNamespace(rank=3)) == 3


async def test_an_error_that_nobody_foresaw_ends_one_look_and_not_the_watch(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(watch, "again_s", lambda failures: pauses.append(failures) or 0.0)
    monkeypatch.setattr(watch, "POLL_S", 0.005)
    house.desire(1, "a")
    house.notes.fault = KeyError("nobody foresaw it")
    watching = asyncio.create_task(house.watch.run())
    async with asyncio.timeout(10):
        while not pauses or max(pauses) < 3:
            await asyncio.sleep(0.005)
        status = house.folder.status()
        assert status is not None
        assert (status.state, status.revision) == ("waiting", "empty")
        assert "tried again: KeyError: 'nobody foresaw it'" in status.reason
        house.notes.fault = None
        while house.watch.revision.revision != "a":
            await asyncio.sleep(0.005)
    house.notes.alive = False
    await watching
    assert house.notes.runs == [digest("a")]


async def test_a_front_that_cannot_begin_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[Any] = []

    async def serve(settings: PlainSettings, llm: Any, args: Any) -> None:
        begun.append(llm)
        if len(begun) < 3:
            raise RuntimeError("no disk")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(front, "again_s", lambda failures: 0.0)
    monkeypatch.setenv("POLYMORPH_KERNELS", str(tmp_path))
    await front._watch(SimpleNamespace(engine_client="llm", args=None))
    assert begun == ["llm"] * 3
    assert "no disk" in caplog.text
    monkeypatch.setenv("POLYMORPH_MIN_ISOLATION", "strong")
    await front._watch(SimpleNamespace(engine_client="llm", args=None))
    assert len(begun) == 3  # what cannot become right is not tried again


def test_it_is_never_long_until_the_next_try() -> None:
    pauses = [again_s(failures) for failures in range(1, 100)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, 30.0)


def test_of_several_fronts_one_leads_and_the_others_name_what_it_says(house: House) -> None:
    llm, other = front_of(0, 1), front_of(2)
    path = server._lock_file(house.folder, llm)
    assert path != server._lock_file(house.folder, other)
    with path.open("a") as first, path.open("a") as second:
        assert server._locked(first.fileno())
        assert not server._locked(second.fileno())
        first.close()
        assert server._locked(second.fileno())


async def test_a_follower_names_the_leaders_revision(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.desire(1, "a")
    await house.step()
    monkeypatch.setattr(RUNNING, "revision", "empty")
    server._follow(house.folder)
    assert RUNNING.revision == "a"


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(front._ENTRY)

    def build_app(args: Any, supported_tasks: Any = None) -> list[str]:
        return list(args.middleware)

    module.build_app = build_app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, front._ENTRY, module)
    monkeypatch.delenv("POLYMORPH_KERNELS", raising=False)
    return module


def test_a_server_with_our_extension_gets_the_middleware_and_another_does_not(entry: Any) -> None:
    front.install()
    front.install()
    slotted = SimpleNamespace(worker_extension_cls=front.EXTENSION, middleware=["mine"])
    assert entry.build_app(slotted) == ["mine", front._NAME]
    assert entry.build_app(SimpleNamespace(worker_extension_cls="", middleware=[])) == []
    by_hand = SimpleNamespace(worker_extension_cls=front.EXTENSION, middleware=[front._NAME])
    assert entry.build_app(by_hand) == [front._NAME]


def test_a_server_that_python_started_as_a_module_is_found(
    entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, front._ENTRY)
    entry.__spec__ = SimpleNamespace(name=front._ENTRY)
    monkeypatch.setitem(sys.modules, "__main__", entry)
    front.install()
    slotted = SimpleNamespace(worker_extension_cls=front.EXTENSION, middleware=[])
    assert entry.build_app(slotted) == [front._NAME]


@pytest.mark.parametrize("broken", ["gone", "other"])
def test_a_vllm_that_builds_its_application_elsewhere_is_told_and_serves(
    broken: str, entry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "gone":
        del entry.build_app
    else:
        entry.build_app = lambda tasks, args: None
    before = dict(vars(entry))
    front.install()
    assert dict(vars(entry)) == before
    assert "no revision in responses, no hot loading" in caplog.text
    assert "--middleware polymorph.engine.plain.front.HotLoading" in caplog.text


def test_the_engine_is_asked_to_record_its_kernels_where_that_can_be(
    entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("POLYMORPH_FLIGHT_DIR", raising=False)
    monkeypatch.setenv("POLYMORPH_KERNELS", str(tmp_path / "kernels"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYMORPH_STATE", str(tmp_path / "file"))
    front.install()
    assert "POLYMORPH_FLIGHT_DIR" not in os.environ
    assert "set POLYMORPH_STATE" in caplog.text
    monkeypatch.setenv("POLYMORPH_STATE", str(tmp_path / "state"))
    front.install()
    recorded = Path(os.environ.pop("POLYMORPH_FLIGHT_DIR"))
    assert recorded.is_dir()
    assert recorded.stat().st_mode & 0o077 == 0


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    assert PlainSettings.read({}).folder is None
    settings = PlainSettings.read({"POLYMORPH_KERNELS": str(tmp_path), "POLYMORPH_TOOLCHAINS": "a, b"})
    assert (settings.folder, settings.toolchains) == (tmp_path.resolve(), {"a", "b"})
    assert settings.flights.parent.parent.name == "plain"
    with pytest.raises(ValueError, match="strong"):
        PlainSettings.read({"POLYMORPH_MIN_ISOLATION": "strong"})
