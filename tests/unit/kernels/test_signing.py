"""Keys, their roles, and signed manifests."""

import json
from pathlib import Path

import pytest

from polymorph.events.values import Numerics
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Role, SignatureRefused, Signer, Trust, sign_manifest, verify_manifest


def manifest(**changes: object) -> Manifest:
    fields = {
        "artifact": "a" * 64,
        "definition": "gemm_n8_k8_f32",
        "definition_digest": "d" * 64,
        "solution": "s" * 64,
        "hardware": "amd",
        "isa": "AVX2",
        "toolchain": "gxx-12",
        "layout": None,
        "numerics": Numerics.REORDERED,
        "min_m": 1,
        "max_m": 8,
        "evidence": "e" * 64,
    }
    return Manifest.model_validate(fields | changes)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.generate(tmp_path / "evaluator.pem")


def test_a_key_is_kept_for_its_owner_alone(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "evaluator.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    assert Signer.load(path).key_id == signer.key_id
    with pytest.raises(FileExistsError):
        Signer.generate(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        Signer.load(path)


def test_a_signed_manifest_verifies(signer: Signer) -> None:
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    assert verify_manifest(sign_manifest(manifest(), signer), trust) == manifest()


def test_a_changed_manifest_is_refused(signer: Signer) -> None:
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    signed = sign_manifest(manifest(), signer)
    forged = signed.model_copy(update={"manifest": manifest(max_m=9)})
    with pytest.raises(SignatureRefused, match="did not sign"):
        verify_manifest(forged, trust)


@pytest.mark.parametrize("signature", ["", "no base64!", "sïgned", "AAAA"])
def test_what_is_no_signature_is_refused_as_one_that_is_wrong(signer: Signer, signature: str) -> None:
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    signed = sign_manifest(manifest(), signer).model_copy(update={"signature": signature})
    with pytest.raises(SignatureRefused, match="did not sign"):
        verify_manifest(signed, trust)


def test_an_unknown_key_is_refused(signer: Signer) -> None:
    with pytest.raises(SignatureRefused, match="not trusted"):
        verify_manifest(sign_manifest(manifest(), signer), Trust())


def test_a_promoter_signs_no_manifest_and_an_evaluator_no_state(tmp_path: Path, signer: Signer) -> None:
    promoter = Signer.generate(tmp_path / "promoter.pem")
    trust = Trust()
    trust.add(promoter.public, Role.PROMOTER)
    trust.add(signer.public, Role.EVALUATOR)
    with pytest.raises(SignatureRefused, match="the promoter's"):
        verify_manifest(sign_manifest(manifest(), promoter), trust)
    with pytest.raises(SignatureRefused, match="the evaluator's"):
        trust.verify(signer.key_id, b"state", signer.sign(b"state"), role=Role.PROMOTER)
    trust.verify(promoter.key_id, b"state", promoter.sign(b"state"), role=Role.PROMOTER)


def test_one_key_has_one_role(signer: Signer) -> None:
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    with pytest.raises(ValueError, match="cannot be the promoter"):
        trust.add(signer.public, Role.PROMOTER)


@pytest.mark.parametrize("signature", ["", "!!", "AAAA"])
def test_a_malformed_signature_is_refused(signer: Signer, signature: str) -> None:
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    with pytest.raises(SignatureRefused):
        trust.verify(signer.key_id, b"content", signature, role=Role.EVALUATOR)


def test_trust_is_kept_in_a_file_that_may_not_be_edited(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "trust.json"
    trust = Trust()
    trust.add(signer.public, Role.EVALUATOR)
    trust.save(path)
    Trust.load(path).verify(signer.key_id, b"x", signer.sign(b"x"), role=Role.EVALUATOR)
    document = json.loads(path.read_text())
    document["keys"][0]["public"] = Signer.generate(tmp_path / "other.pem").public
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="changed"):
        Trust.load(path)


def test_a_public_key_must_be_one() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Trust().add("AAAA", Role.EVALUATOR)
