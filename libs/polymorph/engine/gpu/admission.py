"""From a signed manifest to a kernel that may run on this GPU: the counterpart of the CPU worker's admission."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from polymorph.engine.gpu.artifact import TritonKernel, digest, keep, load, toolchain
from polymorph.engine.gpu.source import ABI, operation_of
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import SignatureRefused, Trust, verify_manifest


class KernelRefused(ValueError):
    """This GPU does not run that kernel, and goes on with what it has."""


def fingerprint() -> str:
    """Names this kind of GPU: results of one kind are never used for another."""
    import torch  # noqa: PLC0415 - checking a manifest needs none

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = (found.name, found.major, found.minor, found.multi_processor_count, torch.version.cuda)
    return f"cuda-sm{found.major}{found.minor}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"


def admit(
    signed: SignedManifest,
    source: str,
    folder: Path,
    trust: Trust,
    *,
    hardware: str,
    quarantined: Collection[str] = (),
) -> TritonKernel:
    """The loaded kernel, kept in `folder`; it has not run yet (`selftest`).

    Raises:
        KernelRefused: not signed by an evaluator, another source, for other hardware or another toolchain.
        SourceRefused: the source holds what such a source may not.
        TritonMissing: there is no Triton here.
    """
    try:
        manifest = verify_manifest(signed, trust)
    except SignatureRefused as error:
        raise KernelRefused(f"the manifest of {signed.manifest.definition}: {error}") from error
    _check(manifest, source, hardware, quarantined)
    return load(keep(source, folder), operation_of(manifest.definition))


def _check(manifest: Manifest, source: str, hardware: str, quarantined: Collection[str]) -> None:
    for name, found, wanted in (
        ("ABI", manifest.abi, ABI),
        ("artifact", digest(source), manifest.artifact),
        ("hardware", manifest.hardware, hardware),
        ("toolchain", manifest.toolchain, toolchain()),
    ):
        if found != wanted:
            raise KernelRefused(f"{manifest.definition}: the {name} is {found}, and must be {wanted}")
    if manifest.artifact in quarantined:
        raise KernelRefused(f"artifact {manifest.artifact[:12]} of {manifest.definition} is in quarantine")
