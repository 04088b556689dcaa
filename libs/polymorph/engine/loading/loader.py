"""From a revision to slots that serve it: fetched, verified, tested beside the engine, engaged, read back."""

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polymorph.engine.bindings import ANY, SlotBinding
from polymorph.engine.loading import testing
from polymorph.engine.loading.admission import Refused, admit_binding, admit_manifest
from polymorph.engine.loading.counters import Counters
from polymorph.engine.loading.disarming import disarmed
from polymorph.engine.loading.engine import SlottedEngine
from polymorph.engine.loading.libraries import HeldLibrary, Libraries
from polymorph.engine.loading.rows import exercise_sizes, sample_rows
from polymorph.engine.selftest_case import SelfTest
from polymorph.engine.support import Verdict, refused
from polymorph.events.values import KernelBinding, Revision
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.inspect import LibraryRefused, inspect_library
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import Trust
from polymorph.kernels.state import state
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation, IsolationTooWeak

_log = logging.getLogger(__name__)
_CAPTURE_S = 1.0
_CAPTURE_EVERY = 7
_CAPTURE_CALLS = 4
_TRAFFIC_S = 0.5


class Artifacts(Protocol):
    """Where signed manifests and libraries come from."""

    async def manifest(self, digest: str) -> SignedManifest: ...

    async def library(self, digest: str) -> bytes: ...


@dataclass(frozen=True)
class Loaded:
    """A revision that the slots serve."""

    revision: Revision
    bindings: tuple[SlotBinding, ...]
    served: Mapping[str, int]
    """Artifact -> calls that it had served when it was read back."""
    paused_s: float

    @property
    def served_calls(self) -> int:
        return sum(self.served.values())


@dataclass
class Loader:
    """Loads revisions into one engine, in two steps: only the second changes what the engine runs."""

    engine: SlottedEngine
    artifacts: Artifacts
    trust: Trust
    hardware: str
    isa: Isa
    scratch: Path
    libraries: Libraries
    min_isolation: Isolation = Isolation.FILTERED
    toolchains: frozenset[str] = frozenset()
    tested: set[tuple[str, str, int, int]] = field(default_factory=set)
    inspected: set[tuple[str, bool, str]] = field(default_factory=set)
    """Artifacts whose bytes kept the rules for what their manifests say of them: bytes of one digest stay the same."""
    admitted: dict[str, Manifest] = field(default_factory=dict)
    """Manifests that may run here, by the digest of the signed document: signatures are checked once."""

    async def prepare(self, revision: Revision, quarantined: set[str]) -> tuple[SlotBinding, ...]:
        """Fetches, verifies and tests the kernels of `revision`.

        Raises:
            Refused: one of them may not run here, or fails its self-test.
        """
        if not revision.kernels:
            return ()
        await self._check_slots(revision)
        return tuple([await self._prepared(kernel, quarantined) for kernel in revision.kernels])

    async def engage(self, revision: Revision, bindings: tuple[SlotBinding, ...]) -> Loaded:
        """Makes the slots run `revision`; after any error they may run it or what they ran before.

        Raises:
            Refused: the engine cannot run its kernels, or they do not serve.
        """
        engaged = await self.engine.engage(bindings)
        served = await self._read_back(bindings, engaged.counted)
        return Loaded(revision, bindings, served, engaged.seconds)

    async def _check_slots(self, revision: Revision) -> None:
        used = self.engine.features
        hindrance = refused(used)
        if hindrance is not None:
            raise Refused(f"no kernel is loaded beside {hindrance.name}: {hindrance.reason}")
        known = self.engine.known
        if not {kernel.definition for kernel in revision.kernels} <= {*known}:
            known = await self.engine.definitions()
        native = "".join(f"; {each.name}: {each.reason}" for each in used if each.verdict is Verdict.NATIVE)
        for kernel in revision.kernels:
            if kernel.definition not in known:
                has = ", ".join(known) or "none"
                raise Refused(f"no slot for {kernel.definition}: this engine has {has}{native}")

    async def _level(self) -> Isolation:
        try:
            return await asyncio.to_thread(isolation.require, self.min_isolation)
        except IsolationTooWeak as error:
            raise Refused(f"no kernel is tested here: {error}") from error

    async def _prepared(self, kernel: KernelBinding, quarantined: set[str]) -> SlotBinding:
        manifest = await self._manifest(kernel)
        admit_binding(kernel, manifest, quarantined)
        held = await self._library(manifest)
        binding = SlotBinding(
            definition=kernel.definition,
            min_m=kernel.min_m,
            max_m=kernel.max_m,
            path=held.path,
            artifact=kernel.artifact,
            layout=manifest.layout,
            least=kernel.least or 0,
            most=ANY if kernel.most is None else kernel.most,
        )
        await self._test(binding, held, str(kernel.numerics))
        return binding

    async def _manifest(self, kernel: KernelBinding) -> Manifest:
        manifest = self.admitted.get(kernel.manifest)
        if manifest is None:
            signed = await self.artifacts.manifest(kernel.manifest)
            manifest = admit_manifest(
                kernel.definition, signed, self.trust, hardware=self.hardware, isa=self.isa, toolchains=self.toolchains
            )  # fmt: skip
            self.admitted[kernel.manifest] = manifest
        return manifest

    async def _library(self, manifest: Manifest) -> HeldLibrary:
        """Fetched and looked into once, for what its manifest says of it."""
        key = (manifest.artifact, manifest.layout is not None, manifest.isa)
        held = self.libraries.held(manifest.artifact) if key in self.inspected else None
        if held is None:
            content = await self.artifacts.library(manifest.artifact)
            # Milliseconds of Python: the event loop that streams tokens is not kept from them.
            await asyncio.to_thread(_inspect, content, manifest)
            self.inspected.add(key)
            held = self.libraries.hold(manifest.artifact, content)
        return held

    async def _test(self, binding: SlotBinding, held: HeldLibrary, numerics: str) -> None:
        key = (binding.artifact, binding.definition, binding.min_m, binding.max_m)
        if key in self.tested:
            return
        level = await self._level()
        folder = self.scratch / binding.artifact
        try:
            calls = await self._captured(binding, folder)
            private = folder / "private"
            private.mkdir(mode=0o700, exist_ok=True)
            await testing.check(
                SelfTest(
                    definition=binding.definition,
                    numerics=numerics,
                    calls=tuple(call["path"] for call in calls),
                    weight=calls[0]["weight"],
                    rows=sample_rows(binding.min_m, binding.max_m),
                    library=held.descriptor,
                    host=await testing.host(),
                    scratch=str(private),
                    level=int(level),
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # activations are kept no longer than they are needed
        name = f"{binding.artifact[:12]} for {binding.definition}"
        _log.info("%s passed its self-test (%s)", name, isolation.describe(level))
        self.tested.add(key)

    async def _captured(self, binding: SlotBinding, folder: Path) -> list[dict[str, str]]:
        """Calls of the live traffic where there is any with such an M, else of our own requests, else of any M."""
        async with disarmed(self.engine):
            await self._capture(binding, binding.min_m, binding.max_m)
            await asyncio.sleep(_CAPTURE_S)
            calls = await self.engine.captured(folder, weight=True)
            for low, high in ((binding.min_m, binding.max_m), (1, 1 << 30)):
                for size in exercise_sizes(low, high):  # decode attention is called by small steps alone
                    if calls:
                        break
                    await self._capture(binding, low, high)
                    await self._exercise(binding, size)
                    calls = await self.engine.captured(folder, weight=True)
        if not calls:
            raise Refused(f"no call of {binding.definition} could be captured to test the kernel on")
        return calls

    async def _capture(self, binding: SlotBinding, low: int, high: int) -> None:
        await self.engine.capture(binding.definition, _CAPTURE_CALLS, _CAPTURE_EVERY, low, high)

    async def _exercise(self, binding: SlotBinding, size: int) -> None:
        samples = "op:sampling" in definition_named(binding.definition).tags
        await (self.engine.exercise_sampling(size) if samples else self.engine.exercise(size))

    async def _read_back(self, bindings: Sequence[SlotBinding], before: Counters) -> dict[str, int]:
        """Calls that the new kernels served: a promotion that is acknowledged and never runs is the classic failure."""
        if not bindings:
            return {}
        await asyncio.sleep(_TRAFFIC_S)
        since = (await self.engine.counters()).since(before)
        for binding in bindings:
            for size in exercise_sizes(binding.min_m, binding.max_m):
                if since.served.get(binding.artifact, 0) == 0:
                    await self._exercise(binding, size)
                    since = (await self.engine.counters()).since(before)
        _raise_for_silence(bindings, since)
        return {each.artifact: since.served.get(each.artifact, 0) for each in bindings}


def _inspect(content: bytes, manifest: Manifest) -> None:
    """What the evaluator saw to is seen to here again, before anything of the library runs in any process."""
    try:
        inspect_library(content, packs=manifest.layout is not None, isa=Isa[manifest.isa])
        reasons = state(content)
    except LibraryRefused as error:
        reasons = list(error.reasons)
    if reasons:
        text = "; ".join(reasons[:5])
        raise Refused(f"the library of {manifest.definition} holds what no kernel needs: {text}"[:1000])


def _raise_for_silence(bindings: Sequence[SlotBinding], since: Counters) -> None:
    failing = {each.artifact for each in bindings if since.errors.get(each.artifact, 0)}
    if failing:
        raise Refused(f"{', '.join(digest[:12] for digest in sorted(failing))} gave errors while serving")
    for binding in (each for each in bindings if since.served.get(each.artifact, 0) == 0):
        passed_by = since.called(binding.definition, binding.min_m, binding.max_m)
        if passed_by and (binding.least, binding.most) == (0, ANY):
            raise Refused(
                f"{binding.artifact[:12]} is engaged for {binding.definition} and served none of {passed_by} calls "
                f"of {binding.min_m} to {binding.max_m} tokens"
            )
        # Traffic of other sizes, or with another feature, hides it, and our own requests join its batches: that is no
        # fault of the kernel.
        _log.info(
            "%s for M from %d to %d is engaged and has served nothing yet",
            binding.definition,
            binding.min_m,
            binding.max_m,
        )
