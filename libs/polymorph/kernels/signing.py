"""Ed25519 signatures: evaluators sign manifests, promoters sign desired states; no key may do both."""

import base64
import hashlib
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from polymorph.kernels.schema import Manifest, SignedManifest


class Role(StrEnum):
    """What a key may sign."""

    EVALUATOR = "evaluator"
    PROMOTER = "promoter"


class SignatureRefused(ValueError):
    """A signature that does not hold, or a key that may not make it."""


class Signer:
    """A private key in a file that only its owner reads."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
        self.key_id = key_id(self.public)

    @classmethod
    def generate(cls, path: Path) -> Self:
        """Makes a key and keeps it at `path` (mode 0600).

        Raises:
            FileExistsError: `path` exists; a key is never overwritten.
        """
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a key.

        Raises:
            ValueError: the file is no Ed25519 key, or others may read it.
        """
        mode = path.stat().st_mode & 0o077
        if mode:
            raise ValueError(f"{path} is open to others (mode {mode:03o}): chmod 600 it")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TypeError(f"{path} holds a {type(key).__name__}: an Ed25519 private key in PEM is wanted")
        return cls(key)

    @classmethod
    def load_or_generate(cls, path: Path) -> Self:
        return cls.load(path) if path.exists() else cls.generate(path)

    def sign(self, content: bytes) -> str:
        """The signature over `content`, base64."""
        return base64.b64encode(self._key.sign(content)).decode()


class Trust:
    """Public keys by id, each with its one role; a JSON file."""

    def __init__(self, keys: dict[str, tuple[Role, str]] | None = None) -> None:
        self._keys = dict(keys or {})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: an entry whose id is not that of its key, or an unknown role.
        """
        trust = cls()
        for entry in json.loads(path.read_text())["keys"]:
            added = trust.add(entry["public"], Role(entry["role"]))
            if added != entry["key_id"]:
                raise ValueError(f"{path}: key {entry['key_id']} has the id {added}: the file was changed")
        return trust

    def add(self, public: str, role: Role) -> str:
        """Trusts a public key (raw, base64) in one role and gives its id; adding it twice changes nothing.

        Raises:
            ValueError: the key is trusted in the other role: signers are kept apart.
        """
        _public_key(public)
        identity = key_id(public)
        known = self._keys.get(identity)
        if known is not None and known[0] is not role:
            raise ValueError(f"key {identity} is the {known[0]}'s: it cannot be the {role}'s too")
        self._keys[identity] = (role, public)
        return identity

    def save(self, path: Path) -> None:
        keys = [
            {"key_id": identity, "role": str(role), "public": public}
            for identity, (role, public) in sorted(self._keys.items())
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        staged.write_text(json.dumps({"keys": keys}, indent=2) + "\n")
        staged.replace(path)

    def verify(self, key_id: str, content: bytes, signature: str, *, role: Role) -> None:
        """Returns where `key_id` is trusted as `role` and signed `content`.

        Raises:
            SignatureRefused: in every other case.
        """
        if key_id not in self._keys:
            raise SignatureRefused(f"key {key_id} is not trusted: {len(self._keys)} other keys are")
        held, public = self._keys[key_id]
        if held is not role:
            raise SignatureRefused(f"key {key_id} is the {held}'s: this needs the {role}'s signature")
        try:
            _public_key(public).verify(base64.b64decode(signature, validate=True), content)
        except (InvalidSignature, ValueError) as error:  # ValueError: no base64, or not even ASCII
            raise SignatureRefused(f"key {key_id} did not sign these {len(content)} bytes") from error


def key_id(public: str) -> str:
    """The id of a public key: the head of its sha256."""
    return hashlib.sha256(base64.b64decode(public)).hexdigest()[:16]


def sign_manifest(manifest: Manifest, signer: Signer) -> SignedManifest:
    return SignedManifest(
        manifest=manifest, key_id=signer.key_id, signature=signer.sign(manifest.canonical())
    )


def verify_manifest(signed: SignedManifest, trust: Trust) -> Manifest:
    """The manifest, where an evaluator that is trusted signed it.

    Raises:
        SignatureRefused: it did not.
    """
    trust.verify(signed.key_id, signed.manifest.canonical(), signed.signature, role=Role.EVALUATOR)
    return signed.manifest


def _public_key(public: str) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
    except ValueError as error:
        raise ValueError(f"public key {public!r} is not 32 bytes in base64") from error
