"""Kernels on disk, each under the digest of its content, readable by this user alone."""

import hashlib
import os
from pathlib import Path

from polymorph.bus.port import Bus
from polymorph.kernels.schema import SignedManifest
from polymorph.worker.domain.admission import Refused


class ArtifactFolder:
    """Fetches from the object store and keeps. A file is never written twice: its name is its content."""

    def __init__(self, folder: Path, bus: Bus) -> None:
        self._folder = folder
        self._bus = bus

    async def manifest(self, digest: str) -> SignedManifest:
        """Raises `Refused` where the object is no signed manifest."""
        content = await self._bus.get_object(digest)
        try:
            return SignedManifest.model_validate_json(content)
        except ValueError as error:
            raise Refused(f"object {digest[:12]} is no signed manifest") from error

    async def library(self, digest: str) -> Path:
        """The path of the shared library. A file that is there is checked again before it is believed.

        Raises:
            Refused: the bytes do not have that digest.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder.resolve() / f"{digest}.so"
        if path.exists() and _digest(path.read_bytes()) == digest:
            return path
        content = await self._bus.get_object(digest)
        if _digest(content) != digest:
            raise Refused(f"the object store gave other bytes for {digest[:12]}")
        staged = path.with_name(f"{digest}.{os.getpid()}")
        staged.write_bytes(content)
        staged.chmod(0o500)
        staged.replace(path)
        return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
