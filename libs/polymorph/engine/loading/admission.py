"""What a worker believes: desired states and kernels, each by its signature, its age and where it was measured."""

import re
from collections.abc import Callable, Collection, Iterable

from polymorph.engine.bindings import ANY
from polymorph.events.state import EMPTY, DesiredState
from polymorph.events.values import KernelBinding, Revision
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import Role, SignatureRefused, Trust, verify_manifest

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ABI = "polymorph-c-abi-1"
_NAME_CHARS, _REASON_CHARS = 200, 4000


class Refused(ValueError):
    """This worker does not run that, and goes on with what it has."""


class Fence:
    """Lets generations only grow, so that an old desired state cannot be played again."""

    def __init__(
        self, pool: str, trust: Trust, newest: int = -1, remember: Callable[[int], None] | None = None
    ) -> None:
        self._pool = pool
        self._trust = trust
        self._remember = remember
        self.newest = newest

    def admit(self, desired: DesiredState) -> None:
        """Believes a state, which holds already or is newer than all before.

        Raises:
            Refused: another pool's, an older generation, or not signed by a promoter.
            Retryable: the generation could not be remembered, and is as new the next time.
        """
        if desired.pool != self._pool:
            raise Refused(f"the desired state is for pool {desired.pool}, this is {self._pool}")
        if desired.generation < self.newest:
            raise Refused(f"generation {desired.generation} is older than {self.newest}, which was seen")
        self._check_signature(desired)
        if desired.generation > self.newest and self._remember is not None:
            self._remember(desired.generation)
        self.newest = desired.generation

    def _check_signature(self, desired: DesiredState) -> None:
        if desired.signature is None:
            if desired.generation == 0 and desired.stable == EMPTY and desired.candidate is None:
                return  # a pool's first state, before any promotion: nothing runs in it, nothing is older than it
            raise Refused(f"generation {desired.generation} is not signed by a promoter")
        try:
            self._trust.verify(
                desired.signature.key_id,
                desired.signed_content(),
                desired.signature.signature,
                role=Role.PROMOTER,
            )
        except SignatureRefused as error:
            raise Refused(f"generation {desired.generation}: {error}") from error


def told_name(revision: str) -> str:
    """The name of a revision as it is told: what stands in a desired state may be too long for an event."""
    return _cut(revision, _NAME_CHARS)


def told_reason(reason: str) -> str:
    """Why something is refused, as it is told: a reason quotes what it refuses."""
    return _cut(reason, _REASON_CHARS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def check_named(revision: Revision) -> None:
    """Raises `Refused` where a file is named by other than the sha256 of its content, and for a name that could not be
    told with all that a worker tells.
    """
    if len(revision.revision) > _NAME_CHARS:
        raise Refused(
            f"{revision.revision[:80]!r} has {len(revision.revision)} characters: a name has at most {_NAME_CHARS}"
        )
    for kernel in revision.kernels:
        for what, name in (("artifact", kernel.artifact), ("manifest", kernel.manifest)):
            if _SHA256.fullmatch(name) is None:
                raise Refused(
                    f"the {what} of {kernel.definition} is {name[:80]!r}: it is named by its sha256, 64 hex digits"
                )


def admit_manifest(
    definition: str,
    signed: SignedManifest,
    trust: Trust,
    *,
    hardware: str,
    isa: Isa,
    toolchains: Collection[str] = (),
) -> Manifest:
    """The manifest of a kernel that may run here; the same document is admitted for as long as this process lives.
    `toolchains` are those whose code is taken; none named takes what an evaluator signed, whatever compiled it.

    Raises:
        Refused: it may not.
    """
    try:
        manifest = verify_manifest(signed, trust)
    except SignatureRefused as error:
        raise Refused(f"the manifest of {definition}: {error}") from error
    if manifest.abi != _ABI:
        raise Refused(f"{definition} is of ABI {manifest.abi}: this engine's slots take {_ABI}")
    if manifest.hardware != hardware:
        raise Refused(f"{definition} was measured on {manifest.hardware}, this is {hardware}")
    if manifest.isa not in Isa.__members__ or not isa.runs(Isa[manifest.isa]):
        raise Refused(f"{definition} needs {manifest.isa}, this processor has {isa.name}")
    if toolchains and manifest.toolchain not in toolchains:
        raise Refused(
            f"{definition} was compiled by {manifest.toolchain}, taken here is {', '.join(sorted(toolchains))}"
        )
    _check_meaning(manifest)
    return manifest


def admit_binding(binding: KernelBinding, manifest: Manifest, quarantined: Collection[str]) -> None:
    """Whether a kernel that may run here may do so as the binding asks, now.

    Raises:
        Refused: it may not.
    """
    _check_identity(binding, manifest)
    check_quarantine([binding], quarantined)


def check_quarantine(bindings: Iterable[KernelBinding], quarantined: Collection[str]) -> None:
    """Raises `Refused` where one of `bindings` is in quarantine."""
    for binding in bindings:
        if binding.artifact in quarantined:
            raise Refused(f"artifact {binding.artifact[:12]} of {binding.definition} is in quarantine")


def _check_meaning(manifest: Manifest) -> None:
    """Whether both sides mean the same by the operation."""
    try:
        own = definition_named(manifest.definition).digest()
    except ValueError as error:
        raise Refused(str(error)) from error
    if manifest.definition_digest != own:
        raise Refused(
            f"{manifest.definition} was judged by definition {manifest.definition_digest[:12]}, this installation's is "
            f"{own[:12]}: evaluate it with this release"
        )


def _check_identity(binding: KernelBinding, manifest: Manifest) -> None:
    for name, asked, signed in (
        ("artifact", binding.artifact, manifest.artifact),
        ("definition", binding.definition, manifest.definition),
        ("numerics", binding.numerics, manifest.numerics),
    ):
        if asked != signed:
            raise Refused(f"the binding's {name} is {asked}, the signed manifest says {signed}")
    if binding.min_m < manifest.min_m or binding.max_m > manifest.max_m:
        raise Refused(
            f"{binding.definition} is bound to M from {binding.min_m} to {binding.max_m}, "
            f"and was approved from {manifest.min_m} to {manifest.max_m}"
        )
    _check_feature(binding, manifest)


def _check_feature(binding: KernelBinding, manifest: Manifest) -> None:
    bounds = (binding.least, binding.most)
    if bounds != (None, None) and not _has_feature(binding.definition):
        raise Refused(f"{binding.definition} has no feature that could lie {_between(*bounds)}")
    lower, upper = manifest.least or 0, ANY if manifest.most is None else manifest.most
    if (binding.least or 0) < lower or (ANY if binding.most is None else binding.most) > upper:
        raise Refused(
            f"{binding.definition} is bound to a feature {_between(*bounds)}, and was approved "
            f"{_between(manifest.least, manifest.most)}"
        )


def _has_feature(definition: str) -> bool:
    try:
        return definition_named(definition).x_polymorph.feature is not None
    except ValueError:
        return False


def _between(least: int | None, most: int | None) -> str:
    return f"from {least or 0} to {'any value' if most is None else most}"
