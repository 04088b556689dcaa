"""What a worker must not load: each is refused with what would be right, an event says so, and what ran runs on.

The engine is a double that notes what it is told to run; the bus, the convergence, all checks and the sandbox's files
are real. The self-test is let pass here: what it refuses is tested beside it.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import StreamRecord
from polymorph.config.clock import SystemClock
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.loading import loader as loading
from polymorph.engine.loading import testing
from polymorph.engine.loading.admission import Fence
from polymorph.engine.loading.counters import NOTHING, Counters
from polymorph.engine.loading.engine import Engaged
from polymorph.engine.loading.libraries import Libraries
from polymorph.engine.loading.loader import Loader
from polymorph.engine.support import Feature, Verdict
from polymorph.events.requests import LeaseHost
from polymorph.events.state import DesiredState, PromoterSignature
from polymorph.events.values import EngineSettings, KernelBinding, Numerics, Revision, Way
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest
from polymorph.kernels.toolchain import NoCompiler
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation
from polymorph.worker.adapters.artifacts import ArtifactFolder
from polymorph.worker.changing import Receipt
from polymorph.worker.convergence import Convergence
from polymorph.worker.domain.change import Plan
from polymorph.worker.faults import Faults
from polymorph.worker.leasing import HostLeasing

DEFINITION = "rms_norm_h64_f32"
OTHER = "rms_norm_h96_f32"
RUN = 'extern "C" int pm_run(void) { return %d; }\n'
BAD = {
    "constructor that exits": (
        RUN % 0 + 'extern "C" void exit(int); __attribute__((constructor)) static void leave() { exit(0); }',
        r"(?s)INIT_ARRAY.*",
    ),
    "constructor": (
        RUN % 0 + "int g; struct S { S() { g = 1; } } s;",
        "INIT_ARRAY: code that runs when it is loaded",
    ),
    "ifunc": (
        """static int one() { return 1; } extern "C" { static int (*pick())() { return one; }
        int pm_run() __attribute__((ifunc("pick"))); }""",
        "IFUNC",
    ),
    "imports exit": (
        'extern "C" void exit(int);\nextern "C" int pm_run() { exit(0); return 0; }',
        "imports exit: only memcpy, memmove, memset are allowed",
    ),
    "keeps state": (
        'float kept[64]; extern "C" int pm_run(int i) { return (int)(kept[i & 63] += 1); }',
        "a kernel keeps no state between calls|exports kept",
    ),
    "system call": (
        'extern "C" int pm_run() { asm volatile(".byte 0x0f, 0x05"); return 0; }',
        "bytes of syscall",
    ),
    "another export": (RUN % 0 + 'extern "C" int malloc() { return 0; }', "exports malloc"),
}


def build(folder: Path, source: str) -> bytes:
    (folder / "k.cpp").write_text(source)
    flags = ["-shared", "-fPIC", "-O1", "-nostdlib", "-ffreestanding", "-Wl,--hash-style=sysv"]
    subprocess.run(["g++", *flags, "k.cpp", "-o", "k.so"], cwd=folder, check=True, capture_output=True)
    return (folder / "k.so").read_bytes()


class Huge(bytes):
    """An object of a gigabyte: whoever does more than look at its size has read it."""

    def __len__(self) -> int:
        return 1 << 30

    def __buffer__(self, *_: object) -> memoryview:
        raise AssertionError("it was read")


class Told:
    """An engine that notes what it runs. One slot; whatever is engaged serves at once."""

    alive = True

    def __init__(self) -> None:
        self.engaged: tuple[SlotBinding, ...] = ()
        self.codes: list[bytes] = []
        self.history: list[str] = []
        self.paused = False
        self.changing = False
        self.slow_s = 0.0
        self.features: tuple[Feature, ...] = ()
        self.known: tuple[str, ...] = ()

    async def definitions(self) -> tuple[str, ...]:
        return (DEFINITION,)

    async def counters(self) -> Counters:
        served = {binding.artifact: len(self.history) for binding in self.engaged}
        return dataclasses.replace(NOTHING, served=served, errors=dict.fromkeys(served, 0))

    async def engage(self, bindings: Any, *, keep_packed: bool = False) -> Engaged:
        assert not self.paused, "kernels changed while the engine was paused"
        assert not self.changing, "two changes at once"
        counted = await self.counters()
        self.changing = True
        await asyncio.sleep(self.slow_s)
        self.engaged = tuple(bindings)
        self.codes = [Path(binding.path).read_bytes() for binding in self.engaged]
        self.history.append(",".join(binding.artifact for binding in self.engaged))
        self.changing = False
        return Engaged(0.0, counted)

    async def capture(self, *_: Any) -> None:
        return

    async def capture_stop(self) -> None:
        return

    async def captured(self, folder: Path, *, weight: bool = False) -> list[dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        return [{"path": "/nonexistent", "weight": None}]

    async def exercise(self, m: int) -> None:
        self.history.append("exercised")

    async def pause(self) -> None:
        assert not self.changing, "paused in the middle of a change"
        self.paused = True

    async def resume(self) -> None:
        self.paused = False


class Same:
    """Settings that never change."""

    async def plan(self, revision: Revision, generation: int) -> Plan:
        return Plan(Way.NOTHING, generation, {}, (), (), EngineSettings(), None, "")

    async def live(self, plan: Plan) -> Receipt:
        return Receipt(EngineSettings(), Way.NOTHING, 0.0)

    async def back_to(self, revision: Revision) -> None:
        return


class Pool:
    """A worker without an engine, and those who sign for it."""

    pool = "p"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = MemoryWorld()
        self.bus = InMemoryBus("/polymorph/test/0", SystemClock(), self.world)
        self.evaluator, self.promoter = Signer.generate(folder / "e"), Signer.generate(folder / "p")
        self.trust = Trust()
        self.trust.add(self.evaluator.public, Role.EVALUATOR)
        self.trust.add(self.promoter.public, Role.PROMOTER)
        self.engine = Told()
        self.libraries = Libraries()
        self.convergence = Convergence(
            "p", "w", Fence("p", self.trust), self, Same(), Faults(folder / "faults", "p", "w", SystemClock()),
            lambda bus, engine: self.loader(bus), SystemClock(),
        )  # fmt: skip
        self.min_isolation = Isolation.PROCESS

    alive = True

    def runs(self, revision: str) -> None:
        return

    def loader(self, bus: Any) -> Loader:
        return Loader(
            engine=self.engine,  # type: ignore[arg-type]
            artifacts=ArtifactFolder(self.folder / "kernels", bus),
            trust=self.trust,
            hardware="here",
            isa=Isa.AVX2,
            scratch=self.folder / "selftest",
            libraries=self.libraries,
            min_isolation=self.min_isolation,
            toolchains=frozenset({"gxx-12"}),
        )

    async def kernel(self, library: bytes, signer: Signer | None = None, **changes: Any) -> KernelBinding:
        """Signed and stored; `changes` are to the manifest."""
        artifact = await self.bus.put_object(library)
        definition = changes.pop("definition", DEFINITION)
        fields = {
            "artifact": artifact, "definition": definition, "definition_digest": definition_named(definition).digest(),
            "solution": "s", "hardware": "here", "isa": "GENERIC", "toolchain": "gxx-12", "layout": None,
            "numerics": Numerics.REORDERED, "min_m": 1, "max_m": 8, "evidence": "e",
        } | changes  # fmt: skip
        signed = sign_manifest(Manifest(**fields), signer or self.evaluator)
        return self.bound(artifact, await self.bus.put_object(signed.canonical()), definition)

    @staticmethod
    def bound(artifact: str, manifest: str, definition: str = DEFINITION) -> KernelBinding:
        return KernelBinding(
            definition=definition, min_m=1, max_m=8, manifest=manifest, artifact=artifact, numerics=Numerics.REORDERED
        )  # fmt: skip

    async def desire(self, generation: int, *kernels: KernelBinding, signer: Signer | None = None) -> None:
        state = self.state(generation, *kernels, signer=signer)
        await self.bus.kv_put(topology.DESIRED, "p", state.model_dump_json().encode())

    def state(self, generation: int, *kernels: KernelBinding, signer: Signer | None = None) -> DesiredState:
        revision = Revision(revision=f"r{generation}", kernels=kernels)
        state = DesiredState(pool=self.pool, generation=generation, stable=revision)
        signer = signer or self.promoter
        signature = PromoterSignature(key_id=signer.key_id, signature=signer.sign(state.signed_content()))
        return state.model_copy(update={"signature": signature})

    async def told(self, generation: int) -> dict[str, Any]:
        """What the worker published about it."""
        async with asyncio.timeout(20):
            async for record in self.bus.events(after="0-0"):
                if isinstance(record, StreamRecord) and record.envelope.data.get("generation") == generation:
                    return {"type": record.envelope.type.split(".")[3], **record.envelope.data}
        raise AssertionError("the stream ended")

    async def refuses(self, generation: int, *kernels: KernelBinding, signer: Signer | None = None) -> str:
        """The reason; nothing about the engine has changed."""
        before = self.engine.engaged
        await self.desire(generation, *kernels, signer=signer)
        event = await self.told(generation)
        assert event["type"] == "refused", event
        assert self.engine.engaged == before != ()
        assert self.convergence.revision.revision == "r1"
        return str(event["reason"])


@pytest.fixture
def honest(tmp_path: Path) -> bytes:
    return build(tmp_path, RUN % 0)


@pytest_asyncio.fixture
async def pool(tmp_path: Path, honest: bytes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    """It runs a kernel already, of generation 1."""

    async def passes(*_: Any) -> str:
        return ""

    monkeypatch.setattr(loading.testing, "check", passes)
    monkeypatch.setattr(loading.testing, "host", passes)
    monkeypatch.setattr(loading, "_CAPTURE_S", 0.0)
    monkeypatch.setattr(loading, "_TRAFFIC_S", 0.0)
    made = Pool(tmp_path)
    run = [made.convergence.watch(made.bus), made.convergence.run(made.bus)]
    tasks = [asyncio.create_task(each) for each in run]
    await made.desire(1, await made.kernel(honest))
    assert (await made.told(1))["type"] == "loaded"
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    made.libraries.close()
    await made.bus.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "there"}, "was measured on there, this is here"),
        ({"isa": "AVX512"}, "needs AVX512, this processor has AVX2"),
        ({"toolchain": "gxx-9"}, "compiled by gxx-9, taken here is gxx-12"),
        ({"definition_digest": "0" * 64}, "judged by definition 000000000000, this installation's is"),
        ({"min_m": 2}, "bound to M from 1 to 8, and was approved from 2 to 8"),
        ({"abi": "triton-1"}, "is of ABI triton-1: this engine's slots take polymorph-c-abi-1"),
        ({"definition": OTHER}, f"no slot for {OTHER}: this engine has {DEFINITION}"),
        ({"definition": "gemm_n0_k1_f32"}, "no slot for gemm_n0_k1_f32"),
        ({"numerics": Numerics.BITWISE}, "the signed manifest says bitwise"),
    ],
)  # fmt: skip
async def test_a_manifest_for_something_else(pool: Pool, changes: dict[str, Any], reason: str) -> None:
    digest = {"definition_digest": "d"} if changes.get("definition") == "gemm_n0_k1_f32" else {}
    kernel = (
        pool.bound("a" * 64, "b" * 64, "gemm_n0_k1_f32")
        if digest
        else await pool.kernel(build(pool.folder, RUN % 2), **changes)
    )
    assert reason in await pool.refuses(2, kernel)


@pytest.mark.parametrize("what", BAD)
async def test_a_library_that_does_what_no_kernel_does(pool: Pool, what: str) -> None:
    source, reason = BAD[what]
    said = await pool.refuses(2, await pool.kernel(build(pool.folder, source)))
    assert re.search(reason, said), said
    assert "holds what no kernel needs" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"#!/bin/sh\nexit 0\n" + b" " * 100, "not a 64-bit little-endian ELF file"),
        (b"", "outside the file of 0 bytes"),
        ("truncated", "outside the file|in no loaded segment|sections"),
    ],
)  # fmt: skip
async def test_bytes_that_are_no_library(pool: Pool, honest: bytes, content: Any, reason: str) -> None:
    said = await pool.refuses(2, await pool.kernel(honest[:900] if content == "truncated" else content))
    assert re.search(reason, said), said


async def test_a_library_whose_bytes_were_changed_in_the_store(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2))
    pool.world.objects["artifacts"][kernel.artifact] = build(pool.folder, RUN % 3)
    assert "other bytes than were signed" in await pool.refuses(2, kernel)


async def test_a_manifest_that_was_changed_after_it_was_signed(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2), hardware="there")
    document = json.loads(await pool.bus.get_object(kernel.manifest))
    document["manifest"]["hardware"] = "here"
    changed = await pool.bus.put_object(json.dumps(document).encode())
    assert "did not sign" in await pool.refuses(2, pool.bound(kernel.artifact, changed))


async def test_a_manifest_without_a_signature(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2))
    document = json.loads(await pool.bus.get_object(kernel.manifest))
    del document["signature"]
    unsigned = await pool.bus.put_object(json.dumps(document).encode())
    said = await pool.refuses(2, pool.bound(kernel.artifact, unsigned))
    assert "no signed manifest: signature: Field required" in said


async def test_a_calling_convention_that_nobody_knows(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2))
    document = json.loads(await pool.bus.get_object(kernel.manifest))
    document["manifest"]["abi"] = "polymorph-c-abi-9"
    changed = await pool.bus.put_object(json.dumps(document).encode())
    said = await pool.refuses(2, pool.bound(kernel.artifact, changed))
    assert "manifest.abi: Input should be 'polymorph-c-abi-1'" in said


async def test_signatures_by_whoever_may_not_make_them(pool: Pool, tmp_path: Path) -> None:
    library = build(pool.folder, RUN % 2)
    stranger = Signer.generate(tmp_path / "stranger")
    said = await pool.refuses(2, await pool.kernel(library, pool.promoter))
    assert "is the promoter's: this needs the evaluator's signature" in said
    assert "is not trusted" in await pool.refuses(3, await pool.kernel(library, stranger))
    good = await pool.kernel(library)
    said = await pool.refuses(4, good, signer=pool.evaluator)
    assert "is the evaluator's: this needs the promoter's signature" in said
    assert "is not trusted" in await pool.refuses(5, good, signer=stranger)


async def test_states_that_are_played_again(pool: Pool) -> None:
    await pool.desire(3, await pool.kernel(build(pool.folder, RUN % 2)))
    assert (await pool.told(3))["type"] == "loaded"
    engaged = pool.engine.engaged
    await pool.desire(2, await pool.kernel(build(pool.folder, RUN % 3)))
    event = await pool.told(2)
    assert (event["type"], event["reason"]) == ("refused", "generation 2 is older than 3, which was seen")
    pool.pool = "another"
    await pool.desire(4, await pool.kernel(build(pool.folder, RUN % 4)))
    event = await pool.told(4)
    assert (event["type"], event["reason"]) == ("refused", "the desired state is for pool another, this is p")
    assert pool.engine.engaged == engaged
    assert pool.convergence.revision.revision == "r3"


async def test_a_gigabyte_is_refused_by_its_size(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2))
    small = pool.world.objects["artifacts"][kernel.artifact]
    pool.world.objects["artifacts"][kernel.artifact] = Huge()
    said = await pool.refuses(2, kernel)
    assert "a library of at most 4194304 bytes is right" in said
    assert "has 1073741824 bytes" in said
    pool.world.objects["artifacts"][kernel.artifact] = small
    manifest = await pool.bus.put_object(b"{" + b" " * (100 << 20) + b"}")
    assert "a manifest of at most 65536 bytes" in await pool.refuses(3, pool.bound(kernel.artifact, manifest))


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63 + "\n"])
async def test_names_that_are_no_digests(pool: Pool, digest: str) -> None:
    library = build(pool.folder, RUN % 2)
    assert "named by its sha256" in await pool.refuses(2, pool.bound("0" * 64, digest))
    kernel = await pool.kernel(library, artifact=digest)
    assert "named by its sha256" in await pool.refuses(3, pool.bound(digest, kernel.manifest))


async def test_a_file_that_is_swapped_after_the_check_is_not_what_loads(pool: Pool, honest: bytes) -> None:
    evil, good = build(pool.folder, RUN % 66), build(pool.folder, RUN % 2)
    kernel = await pool.kernel(good)
    prepare = loading.Loader.prepare

    async def swapped(self: Any, *arguments: Any) -> Any:
        bindings = await prepare(self, *arguments)
        for path in (pool.folder / "kernels").iterdir():
            path.chmod(0o600)
            path.write_bytes(evil)
        return bindings

    loading.Loader.prepare = swapped  # type: ignore[method-assign]
    try:
        await pool.desire(2, kernel)
        assert (await pool.told(2))["type"] == "loaded"
    finally:
        loading.Loader.prepare = prepare  # type: ignore[method-assign]
    assert pool.engine.codes == [good]
    (held,) = pool.engine.engaged
    with pytest.raises(PermissionError):
        os.pwrite(held_descriptor(held.path), b"evil", 0)
    # And what lies on disk is believed by its digest alone.
    await pool.desire(3, await pool.kernel(honest))
    assert (await pool.told(3))["type"] == "loaded"
    assert pool.engine.codes == [honest]
    assert hashlib.sha256(pool.engine.codes[0]).hexdigest() == pool.engine.engaged[0].artifact


async def test_less_isolation_than_demanded_loads_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.min_isolation = Isolation.NAMESPACED
    monkeypatch.setattr(isolation, "detect", lambda: Isolation.FILTERED)
    said = await pool.refuses(2, await pool.kernel(build(pool.folder, RUN % 2)))
    assert "isolation here is filtered, at least namespaced is demanded" in said


async def test_an_engine_with_what_goes_with_no_kernel(pool: Pool) -> None:
    kernel = await pool.kernel(build(pool.folder, RUN % 2))
    pool.engine.features = (Feature("pooling", Verdict.REFUSED, "it generates nothing"),)
    assert await pool.refuses(2, kernel) == "no kernel is loaded beside pooling: it generates nothing"
    pool.engine.features = (Feature("quantised linear", Verdict.NATIVE, "fp8 has no slot"),)
    missing = pool.bound("a" * 64, "b" * 64, "gemm_n8_k8_f32")
    assert (await pool.refuses(3, missing)).endswith("quantised linear: fp8 has no slot")
    await pool.desire(4, kernel)
    assert (await pool.told(4))["type"] == "loaded"


async def test_a_disk_that_takes_nothing_is_no_reason_to_load_nothing(pool: Pool) -> None:
    folder = pool.folder / "kernels"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    good = build(pool.folder, RUN % 2)
    await pool.desire(2, await pool.kernel(good))
    assert (await pool.told(2))["type"] == "loaded"
    assert pool.engine.codes == [good]


async def test_a_host_without_a_compiler_refuses(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NoCompiler("g++ is not on PATH")

    monkeypatch.undo()
    monkeypatch.setattr(testing, "detect_toolchain", missing)
    monkeypatch.setattr(loading, "_CAPTURE_S", 0.0)
    said = await pool.refuses(2, await pool.kernel(build(pool.folder, RUN % 2)))
    assert said == "no kernel is tested here: g++ is not on PATH"


async def test_two_promotions_at_once_are_loaded_one_after_the_other(pool: Pool) -> None:
    pool.engine.slow_s = 0.3
    kernels = [await pool.kernel(build(pool.folder, RUN % n)) for n in (2, 3, 4)]
    for generation, kernel in enumerate(kernels, start=2):
        await pool.desire(generation, kernel)
    assert (await pool.told(4))["type"] == "loaded"
    assert [each.artifact for each in pool.engine.engaged] == [kernels[-1].artifact]
    assert pool.convergence.generation == 4


async def test_a_promotion_waits_for_a_pause_and_a_pause_for_a_promotion(pool: Pool) -> None:
    """The double asserts that it is never changed while it is paused, nor paused while it is changed."""
    leasing = HostLeasing("p", "w", pool, SystemClock(), lambda: False, pool.convergence.standing)  # type: ignore[arg-type]

    def lease(lease_id: str) -> Any:
        return leasing.ask(LeaseHost(worker_id="w", lease_id=lease_id, burst_s=0.3))

    assert (await lease("a")).granted
    await pool.desire(2, await pool.kernel(build(pool.folder, RUN % 2)))
    assert (await pool.told(2))["type"] == "loaded"
    pool.engine.slow_s = 0.4
    await pool.desire(3, await pool.kernel(build(pool.folder, RUN % 3)))
    async with asyncio.timeout(10):
        while not pool.engine.changing:
            await asyncio.sleep(0.01)
    answer = await lease("a")
    assert (answer.granted, answer.reason) == (False, "the engine is being changed; ask again")
    assert (await pool.told(3))["type"] == "loaded"
    assert (await lease("a")).granted
    assert pool.engine.paused
    await leasing.close(None)


def held_descriptor(path: str) -> int:
    """A user that may do anything may open it to write, and may not write."""
    return os.open(path, os.O_RDWR)


def test_a_descriptor_never_stands_for_a_second_library() -> None:
    """A loader gives back what it has loaded under a path, whatever lies there by now."""
    libraries = Libraries(kept=2)
    paths = [libraries.hold(f"{n}", bytes([n])).path for n in range(5)]
    again = libraries.hold("0", b"\0").path
    assert len({*paths, again}) == 6
    assert Path(again).read_bytes() == b"\0"
    assert [Path(path).exists() for path in paths] == [False, False, False, False, True]
    assert libraries.hold("4", b"\4").path == paths[4]
    libraries.close()
