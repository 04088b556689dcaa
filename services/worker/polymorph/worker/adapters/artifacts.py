"""Kernels out of the object store, and a copy of each on disk under the digest of its content."""

import hashlib
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from polymorph.bus.errors import Corrupt, TooLarge
from polymorph.bus.port import Bus
from polymorph.engine.loading.admission import Refused
from polymorph.kernels.schema import SignedManifest
from polymorph.kernels.state import MOST_BYTES

_log = logging.getLogger(__name__)
_MANIFEST_BYTES = 64 << 10


class ArtifactFolder:
    """Fetches from the object store and keeps. What is on disk is believed by its digest alone."""

    def __init__(self, folder: Path, bus: Bus) -> None:
        self._folder = folder
        self._bus = bus

    async def manifest(self, digest: str) -> SignedManifest:
        """Raises `Refused` where the object is no signed manifest, or too large for one."""
        content = await self._fetched(digest, "json", _MANIFEST_BYTES, "a manifest")
        try:
            return SignedManifest.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the document"
            raise Refused(f"object {digest[:12]} is no signed manifest: {where}: {first['msg']}") from error

    async def library(self, digest: str) -> bytes:
        """The bytes of a shared library, which have that digest.

        Raises:
            Refused: the object's bytes do not, or are too many.
        """
        return await self._fetched(digest, "so", MOST_BYTES, "a library")

    async def _fetched(self, digest: str, suffix: str, at_most: int, what: str) -> bytes:
        path = self._folder / f"{digest}.{suffix}"
        content = _kept(path)
        if content is not None and _digest(content) == digest:
            return content
        content = await self._object(digest, at_most, what)
        try:
            self._keep(path, content)
        except OSError as error:
            _log.warning("%s is not kept on disk, and fetched anew the next time: %s", path.name, error)
        return content

    def _keep(self, path: Path, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = path.with_suffix(f".{os.getpid()}")
        staged.write_bytes(content)
        staged.chmod(0o400)
        staged.replace(path)

    async def _object(self, digest: str, at_most: int, what: str) -> bytes:
        try:
            return await self._bus.get_object(digest, at_most=at_most)
        except TooLarge as error:
            raise Refused(f"{what} of at most {at_most} bytes is right: {error}") from error
        except Corrupt as error:
            raise Refused(f"the object store holds other bytes than were signed: {error}") from error


def _kept(path: Path) -> bytes | None:
    """The file's first bytes, one more than anything here may have: a longer file has another digest."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
