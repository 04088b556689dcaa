"""From a signed manifest to a loaded kernel, up to where Triton itself would be needed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from polymorph.engine import gpu
from polymorph.engine.gpu import admission, artifact
from polymorph.engine.gpu.admission import KernelRefused, admit
from polymorph.engine.gpu.artifact import TritonMissing, digest, keep, load
from polymorph.engine.gpu.source import SourceRefused
from polymorph.events.values import Numerics
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest

SOURCE = (Path(gpu.__file__).parent / "kernels" / "silu_and_mul_flat.py").read_text()
WITHOUT_TRITON = importlib.util.find_spec("triton") is None


@pytest.fixture
def evaluator(tmp_path: Path) -> Signer:
    return Signer.generate(tmp_path / "evaluator.pem")


@pytest.fixture
def trust(evaluator: Signer) -> Trust:
    made = Trust()
    made.add(evaluator.public, Role.EVALUATOR)
    return made


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What got as far as being loaded."""
    paths: list[Path] = []
    monkeypatch.setattr(admission, "toolchain", lambda: "triton 3.9.0 fp-fusion=1")
    monkeypatch.setattr(admission, "load", lambda path, operation: paths.append(path) or operation)
    return paths


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "artifact": digest(SOURCE),
        "definition": "silu_and_mul_d1536_bf16",
        "definition_digest": "d",
        "solution": "s",
        "abi": "triton-1",
        "hardware": "cuda-sm90-0",
        "isa": "GENERIC",
        "toolchain": "triton 3.9.0 fp-fusion=1",
        "layout": None,
        "numerics": Numerics.REORDERED,
        "min_m": 1,
        "max_m": 64,
        "evidence": "e",
    }
    return Manifest(**(fields | changes))


def test_a_signed_kernel_for_this_gpu_is_kept_by_its_content_and_loaded(
    tmp_path: Path, evaluator: Signer, trust: Trust, loaded: list[Path]
) -> None:
    signed = sign_manifest(manifest(), evaluator)
    assert admit(signed, SOURCE, tmp_path, trust, hardware="cuda-sm90-0") == "silu_and_mul"
    assert [path.name for path in loaded] == [f"{digest(SOURCE)}.py"]
    assert (loaded[0].read_text(), loaded[0].stat().st_mode & 0o777) == (SOURCE, 0o400)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"abi": "polymorph-c-abi-1"}, "the ABI is"),
        ({"artifact": "b" * 64}, "the artifact is"),
        ({"hardware": "cuda-sm80-0"}, "the hardware is"),
        ({"toolchain": "triton 3.8.0 fp-fusion=1"}, "the toolchain is"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path, evaluator: Signer, trust: Trust, loaded: list[Path], changes: dict[str, Any], reason: str
) -> None:
    signed = sign_manifest(manifest(**changes), evaluator)
    with pytest.raises(KernelRefused, match=reason):
        admit(signed, SOURCE, tmp_path, trust, hardware="cuda-sm90-0")
    assert loaded == []


def test_a_tampered_unsigned_or_quarantined_kernel_is_refused(
    tmp_path: Path, evaluator: Signer, trust: Trust, loaded: list[Path]
) -> None:
    signed = sign_manifest(manifest(), evaluator)
    other = signed.model_copy(update={"manifest": manifest(max_m=8192)})
    with pytest.raises(KernelRefused, match="did not sign"):
        admit(other, SOURCE, tmp_path, trust, hardware="cuda-sm90-0")
    with pytest.raises(KernelRefused, match="not trusted"):
        admit(signed, SOURCE, tmp_path, Trust(), hardware="cuda-sm90-0")
    with pytest.raises(KernelRefused, match="the artifact is"):
        admit(signed, SOURCE + "\n", tmp_path, trust, hardware="cuda-sm90-0")
    with pytest.raises(KernelRefused, match="quarantine"):
        admit(signed, SOURCE, tmp_path, trust, hardware="cuda-sm90-0", quarantined={digest(SOURCE)})
    assert loaded == []


def test_a_file_that_changed_since_it_was_kept_is_refused(tmp_path: Path) -> None:
    path = keep(SOURCE, tmp_path)
    path.chmod(0o600)
    path.write_text(SOURCE + "\nimport os\n")
    with pytest.raises(SourceRefused, match="holds other content"):
        load(path, "silu_and_mul")


def test_a_kernel_of_another_operation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match="launch must take y, x, weight, eps"):
        load(keep(SOURCE, tmp_path), "rms_norm")


@pytest.mark.skipif(not WITHOUT_TRITON, reason="triton is installed")
def test_without_triton_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(TritonMissing, match="triton does not import here"):
        load(keep(SOURCE, tmp_path), "silu_and_mul")
    with pytest.raises(TritonMissing):
        artifact.toolchain()
