"""What a worker fetches and looks into once, however often a kernel is engaged: the rest of a swap costs streams time."""

import hashlib
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polymorph.engine.loading import loader as loading
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.libraries import Libraries
from polymorph.engine.loading.loader import Loader
from polymorph.events.values import KernelBinding, Numerics, Revision
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest
from polymorph.worker.adapters.artifacts import ArtifactFolder

DEFINITION = "gemm_n16_k16_f32"
LIBRARY = b"a library"
ARTIFACT = hashlib.sha256(LIBRARY).hexdigest()


class Store:
    """An object store that counts what is asked of it; the rest of a bus is not there."""

    def __init__(self, *objects: bytes) -> None:
        self.objects = {hashlib.sha256(content).hexdigest(): content for content in objects}
        self.asked: Counter[str] = Counter()

    async def get_object(self, digest: str, *, at_most: int) -> bytes:
        self.asked[digest] += 1
        return self.objects[digest]


class World:
    """One signed kernel, and a loader whose engine has a slot for it."""

    def __init__(self, folder: Path) -> None:
        evaluator = Signer.generate(folder / "evaluator.pem")
        trust = Trust()
        trust.add(evaluator.public, Role.EVALUATOR)
        manifest = Manifest(
            artifact=ARTIFACT, definition=DEFINITION, definition_digest=definition_named(DEFINITION).digest(),
            solution="s", hardware="here", isa="GENERIC", toolchain="t", layout=None,
            numerics=Numerics.BITWISE, min_m=1, max_m=8, evidence="e",
        )  # fmt: skip
        signed = sign_manifest(manifest, evaluator).canonical()
        self.store: Any = Store(signed, LIBRARY)
        self.manifest = hashlib.sha256(signed).hexdigest()
        self.folder = folder / "kernels"
        self.artifacts = ArtifactFolder(self.folder, self.store)
        engine: Any = SimpleNamespace(features=(), known=(), definitions=self._definitions)
        tested = {(ARTIFACT, DEFINITION, 1, 8)}
        self.loader = Loader(
            engine, self.artifacts, trust, "here", Isa.AVX2, folder, Libraries(), tested=tested
        )

    async def _definitions(self) -> tuple[str, ...]:
        return (DEFINITION,)

    async def prepare(self, quarantined: set[str] | None = None) -> None:
        kernel = KernelBinding(
            definition=DEFINITION, min_m=1, max_m=8, manifest=self.manifest, artifact=ARTIFACT,
            numerics=Numerics.BITWISE,
        )  # fmt: skip
        await self.loader.prepare(Revision(revision="r", kernels=(kernel,)), quarantined or set())


async def test_a_kernel_is_fetched_and_looked_into_once_and_not_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, threads = World(tmp_path), []
    monkeypatch.setattr(loading, "_inspect", lambda *_: threads.append(threading.get_ident()))
    for _ in range(3):
        await world.prepare()
    assert world.store.asked == {world.manifest: 1, ARTIFACT: 1}
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_signatures_are_checked_once_and_quarantines_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, checked = World(tmp_path), []
    admit = loading.admit_manifest

    def admitting(*given: Any, **named: Any) -> Manifest:
        checked.append(given)
        return admit(*given, **named)

    monkeypatch.setattr(loading, "_inspect", lambda *_: None)
    monkeypatch.setattr(loading, "admit_manifest", admitting)
    for _ in range(3):
        await world.prepare()
    assert len(checked) == 1
    with pytest.raises(Refused, match="quarantine"):
        await world.prepare({ARTIFACT})


async def test_a_library_that_was_refused_is_looked_into_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, looks = World(tmp_path), []

    def refuse(*_: object) -> None:
        looks.append(1)
        raise Refused("it holds what no kernel needs")

    monkeypatch.setattr(loading, "_inspect", refuse)
    for _ in range(2):
        with pytest.raises(Refused, match="what no kernel needs"):
            await world.prepare()
    assert len(looks) == 2


async def test_a_kept_manifest_is_believed_by_its_digest_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    signed = await world.artifacts.manifest(world.manifest)
    kept = world.folder / f"{world.manifest}.json"
    kept.chmod(0o600)
    kept.write_bytes(kept.read_bytes().replace(b"here", b"nowhere"))
    assert await world.artifacts.manifest(world.manifest) == signed
    assert world.store.asked[world.manifest] == 2
