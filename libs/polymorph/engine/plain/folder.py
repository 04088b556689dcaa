"""The folder that a plain `vllm serve` is told what to run by, in place of the bus.

desired.json             the desired state, signed by a promoter: the same document as on the bus
kernels/<digest>.json    signed manifests under the digest of their bytes
kernels/<digest>.so      libraries likewise
quarantine/<digest>      never load the artifact of that digest; the text says why
status.json              what the server answers
"""

import hashlib
import os
import re
import stat
import time
from pathlib import Path

from pydantic import ValidationError

from polymorph.bus.errors import Retryable
from polymorph.engine.loading.admission import Refused
from polymorph.engine.plain.status import PlainStatus
from polymorph.events.state import DesiredState
from polymorph.kernels.schema import SignedManifest
from polymorph.kernels.state import MOST_BYTES

_DOCUMENT_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int, int]
"""Tells a file from the one that was there before."""


class NotThere(Retryable):
    """A file that is named and does not exist yet: whoever copies a folder may come to it last."""


class KernelFolder:
    """Reads as the server, writes as the operator; every file is replaced whole, never changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.desired_path = path / "desired.json"
        self.status_path = path / "status.json"
        self.quarantine_path = path / "quarantine"
        self._kernels = path / "kernels"

    def stamp(self) -> Stamp | None:
        """Changes with desired.json; None while there is none."""
        try:
            found = self.desired_path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def desired(self) -> DesiredState | None:
        """What is desired; None where nothing ever was.

        Raises:
            Refused: the file is no desired state.
        """
        try:
            content = _read(self.desired_path, _DOCUMENT_BYTES)
        except NotThere:
            return None
        try:
            return DesiredState.model_validate_json(content)
        except ValidationError as error:
            raise Refused(f"{self.desired_path.name} is no desired state: {_first(error)}") from error

    async def manifest(self, digest: str) -> SignedManifest:
        """Raises `Refused` where the file is no signed manifest of that digest, `NotThere` where there is none."""
        content = self._checked(digest, "json", _DOCUMENT_BYTES)
        try:
            return SignedManifest.model_validate_json(content)
        except ValidationError as error:
            raise Refused(f"kernels/{digest[:12]}.json is no signed manifest: {_first(error)}") from error

    async def library(self, digest: str) -> bytes:
        """The bytes of a library, which have that digest; raises as `manifest` does."""
        return self._checked(digest, "so", MOST_BYTES)

    def quarantined(self, artifacts: set[str]) -> set[str]:
        return {artifact for artifact in artifacts if (self.quarantine_path / artifact).exists()}

    def quarantine(self, artifact: str, reason: str) -> None:
        self.quarantine_path.mkdir(parents=True, exist_ok=True)
        _write(self.quarantine_path / artifact, reason.encode() + b"\n")

    def status(self) -> PlainStatus | None:
        """What a server of this folder last said; None where none did."""
        try:
            return PlainStatus.model_validate_json(_read(self.status_path, _DOCUMENT_BYTES))
        except (NotThere, Refused, ValidationError):
            return None

    def say(self, status: PlainStatus) -> None:
        """Raises OSError where the folder cannot be written."""
        _write(self.status_path, status.model_dump_json(indent=2).encode() + b"\n")

    def put(self, content: bytes, suffix: str) -> str:
        """Keeps a manifest or a library under its digest, which it returns."""
        digest = hashlib.sha256(content).hexdigest()
        self._kernels.mkdir(parents=True, exist_ok=True)
        _write(self._kernels / f"{digest}.{suffix}", content)
        return digest

    def desire(self, state: DesiredState) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.desired_path, state.model_dump_json(indent=2).encode() + b"\n")

    def _checked(self, digest: str, suffix: str, most: int) -> bytes:
        if _DIGEST.fullmatch(digest) is None:
            raise Refused(f"{digest[:80]!r} is no digest: 64 of 0-9 and a-f name a file")
        content = _read(self._kernels / f"{digest}.{suffix}", most)
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise Refused(f"kernels/{digest[:12]}.{suffix} holds other bytes, of digest {found[:12]}")
        return content


def _read(path: Path, most: int) -> bytes:
    """A file, at most `most` bytes of it.

    Raises:
        NotThere: there is none.
        Refused: it is longer, or no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotThere(f"{path.name} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Refused(f"{path.name} is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(f"{path.name} has more than {most} bytes")
    return content


def _write(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    staged.write_bytes(content)
    staged.replace(path)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"
