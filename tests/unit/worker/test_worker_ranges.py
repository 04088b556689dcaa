"""A kernel that is bound to a range of its definition's feature, on its way into an engine."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polymorph.engine.bindings import ANY, SlotBinding
from polymorph.engine.loading import loader as loading
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.counters import NOTHING, Counters
from polymorph.engine.loading.engine import Engaged
from polymorph.engine.loading.loader import Loader
from polymorph.events.values import KernelBinding, Numerics, Revision
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest

DEFINITION = "moe_e4_k2_h32_i32_f32"
WHOLE = SlotBinding(DEFINITION, 1, 8, "/x.so", "a" * 64)


class Engine:
    """Counts calls of the definition that no kernel served."""

    def __init__(self, calls: Mapping[str, int]) -> None:
        self._calls = calls
        self._asked = 0

    async def counters(self) -> Counters:
        self._asked += 1
        calls = {name: count * self._asked for name, count in self._calls.items()}
        return dataclasses.replace(NOTHING, calls={DEFINITION: calls})

    async def engage(self, bindings: Any) -> Engaged:
        return Engaged(0.0, await self.counters())

    async def exercise(self, size: int) -> None:
        pass


def _loader(folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> Loader:
    monkeypatch.setattr(loading, "_TRAFFIC_S", 0.0)
    nothing: Any = SimpleNamespace()
    return Loader(engine, nothing, Trust(), "here", Isa.AVX2, folder, nothing)


async def test_calls_whose_feature_lies_elsewhere_pass_a_kernel_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = _loader(tmp_path, Engine({"4": 3}), monkeypatch)
    ranged = dataclasses.replace(WHOLE, least=60)
    loaded = await loader.engage(Revision(revision="r"), (ranged,))
    assert loaded.served_calls == 0
    with pytest.raises(Refused, match="served none of"):
        await loader.engage(Revision(revision="r"), (WHOLE,))


async def test_the_range_of_a_revision_reaches_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer, trust = Signer.generate(tmp_path / "key.pem"), Trust()
    trust.add(signer.public, Role.EVALUATOR)
    manifest = Manifest(
        artifact=WHOLE.artifact,
        definition=DEFINITION,
        definition_digest=definition_named(DEFINITION).digest(),
        solution="s",
        hardware="here",
        isa="AVX2",
        toolchain="t",
        layout=None,
        numerics=Numerics.REORDERED,
        min_m=1,
        max_m=8,
        evidence="e",
    )
    kernel = KernelBinding(
        definition=DEFINITION, min_m=1, max_m=8, manifest="m", artifact=WHOLE.artifact, numerics="reordered"
    )

    class Held:
        features: tuple[Any, ...] = ()
        known: tuple[str, ...] = ()

        async def manifest(self, digest: str) -> SignedManifest:
            return sign_manifest(manifest, signer)

        async def library(self, digest: str) -> bytes:
            return b""

        async def definitions(self) -> tuple[str, ...]:
            return (DEFINITION,)

        def hold(self, digest: str, content: bytes) -> Any:
            return SimpleNamespace(path=WHOLE.path)

        def held(self, digest: str) -> Any:
            return self.hold(digest, b"")

    held: Any = Held()
    monkeypatch.setattr(loading, "_inspect", lambda content, manifest: None)
    tested = {(WHOLE.artifact, DEFINITION, 1, 8)}
    loader = Loader(held, held, trust, "here", Isa.AVX2, tmp_path, held, tested=tested)
    ranged = kernel.model_copy(update={"least": 60, "most": 90})
    for wanted, bound in (((0, ANY), kernel), ((60, 90), ranged)):
        (binding,) = await loader.prepare(Revision(revision="r", kernels=(bound,)), set())
        assert (binding.least, binding.most) == wanted
