"""What the operator of a plain server writes: signed manifests, and desired states of ever newer generations."""

import hashlib
from dataclasses import dataclass

from polymorph.engine.plain.folder import KernelFolder
from polymorph.events.state import DesiredState, Mode, PromoterSignature
from polymorph.events.values import KernelBinding, Numerics, Revision
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Cpu, Isa
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import Signer, sign_manifest


class NotDesirable(ValueError):
    """What was asked for cannot be written; the text says what would be right."""


@dataclass(frozen=True)
class Approval:
    """What an evaluator, or a person in its place, says of a library that was built and tried on this machine."""

    definition: str
    numerics: Numerics
    isa: Isa
    min_m: int
    max_m: int
    layout: str | None
    toolchain: str

    def signed(self, library: bytes, signer: Signer) -> SignedManifest:
        """Raises `NotDesirable` for a definition that does not exist."""
        try:
            definition = definition_named(self.definition).digest()
        except ValueError as error:
            raise NotDesirable(str(error)) from error
        artifact = hashlib.sha256(library).hexdigest()
        manifest = Manifest(
            artifact=artifact,
            definition=self.definition,
            definition_digest=definition,
            solution="by hand",
            hardware=Cpu.read().fingerprint,
            isa=self.isa.name,
            toolchain=self.toolchain,
            layout=self.layout,
            numerics=self.numerics,
            min_m=self.min_m,
            max_m=self.max_m,
            evidence="by hand",
        )
        return sign_manifest(manifest, signer)


def put(
    folder: KernelFolder,
    signer: Signer,
    signed: SignedManifest,
    library: bytes,
    *,
    pool: str | None,
    min_m: int | None = None,
    max_m: int | None = None,
) -> DesiredState:
    """Adds a kernel to what is desired, in place of those of its definition that it overlaps.

    Raises:
        NotDesirable: the manifest is of another library, or no pool is known.
    """
    manifest = signed.manifest
    artifact = hashlib.sha256(library).hexdigest()
    if artifact != manifest.artifact:
        raise NotDesirable(
            f"the library has digest {artifact[:12]}, the manifest is of {manifest.artifact[:12]}"
        )
    folder.put(library, "so")
    binding = KernelBinding(
        definition=manifest.definition,
        min_m=min_m or manifest.min_m,
        max_m=max_m or manifest.max_m,
        manifest=folder.put(signed.canonical(), "json"),
        artifact=artifact,
        numerics=manifest.numerics,
    )
    before = folder.desired()
    kept = [] if before is None else [each for each in before.stable.kernels if not _overlap(each, binding)]
    return _desire(folder, signer, before, (*kept, binding), pool)


def clear(folder: KernelFolder, signer: Signer, *, pool: str | None) -> DesiredState:
    """From now on the engine's own code is desired; raises as `put` does."""
    return _desire(folder, signer, folder.desired(), (), pool)


def _desire(
    folder: KernelFolder,
    signer: Signer,
    before: DesiredState | None,
    kernels: tuple[KernelBinding, ...],
    pool: str | None,
) -> DesiredState:
    status = folder.status()
    known = pool or (status.pool if status else None) or (before.pool if before else None)
    if known is None:
        raise NotDesirable(f"no server has written {folder.status_path} yet: name its pool with --pool")
    newest = max(before.generation if before else 0, status.generation if status else 0, 0)
    state = DesiredState(
        pool=known, generation=newest + 1, mode=Mode.PINNED, stable=_revision(kernels, before)
    )
    signature = PromoterSignature(key_id=signer.key_id, signature=signer.sign(state.signed_content()))
    state = state.model_copy(update={"signature": signature})
    folder.desire(state)
    return state


def _revision(kernels: tuple[KernelBinding, ...], before: DesiredState | None) -> Revision:
    if not kernels:
        return Revision(revision="empty")
    text = "\n".join(sorted(kernel.model_dump_json() for kernel in kernels))
    name = f"r-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    parent = before.stable.revision if before is not None else None
    return Revision(revision=name, parent=parent, kernels=kernels)


def _overlap(one: KernelBinding, two: KernelBinding) -> bool:
    return one.definition == two.definition and one.min_m <= two.max_m and two.min_m <= one.max_m
