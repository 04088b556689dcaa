"""The folder of a plain server: what is read from it, and what an operator writes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polymorph.embedded.kernels import main as kernels
from polymorph.engine.loading.admission import Fence, Refused
from polymorph.engine.plain.folder import KernelFolder, NotThere
from polymorph.kernels.signing import Trust, verify_manifest

DEFINITION = "gemm_n512_k256_f32"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert kernels(["keygen", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def put(folder: Path, keys: Path, content: bytes, *more: str, key: str = "promoter.pem") -> int:
    library = folder.parent / f"{len(content)}-{content[:4].hex()}.so"
    library.write_bytes(content)
    signing = ["--definition", DEFINITION, "--key", str(keys / "evaluator.pem")]
    assert kernels(["sign", str(library), *signing]) == 0
    files = ["--manifest", f"{library}.json", "--library", str(library), "--key", str(keys / key)]
    return kernels(["put", str(folder), *files, "--pool", "p", *more])


async def test_what_an_operator_puts_is_what_a_server_believes(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "kernels"
    assert put(path, keys, b"one", "--max-m", "8") == 0
    assert put(path, keys, b"two", "--min-m", "9") == 0
    folder = KernelFolder(path)
    trust = Trust.load(keys / "trust.json")
    state = folder.desired()
    assert state is not None
    Fence("p", trust).admit(state)
    assert (state.generation, [kernel.min_m for kernel in state.stable.kernels]) == (2, [1, 9])
    for kernel, content in zip(state.stable.kernels, (b"one", b"two"), strict=True):
        assert await folder.library(kernel.artifact) == content
        assert verify_manifest(await folder.manifest(kernel.manifest), trust).artifact == kernel.artifact

    # A kernel of the same definition takes the place of those whose range it overlaps; clear leaves none.
    assert put(path, keys, b"three", "--min-m", "1", "--max-m", "4") == 0
    state = folder.desired()
    assert state is not None
    assert [kernel.min_m for kernel in state.stable.kernels] == [9, 1]
    assert kernels(["clear", str(path), "--key", str(keys / "promoter.pem")]) == 0
    state = folder.desired()
    assert state is not None
    Fence("p", trust, newest=3).admit(state)
    assert (state.generation, state.stable.kernels) == (4, ())


def test_a_key_signs_in_its_own_role_alone(tmp_path: Path, keys: Path) -> None:
    assert put(tmp_path / "kernels", keys, b"one", key="evaluator.pem") == 0
    state = KernelFolder(tmp_path / "kernels").desired()
    assert state is not None
    with pytest.raises(Refused, match="is the evaluator's: this needs the promoter's signature"):
        Fence("p", Trust.load(keys / "trust.json")).admit(state)


def test_what_cannot_be_put_is_refused_in_one_line(
    tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library, other = tmp_path / "a.so", tmp_path / "b.so"
    library.write_bytes(b"a")
    other.write_bytes(b"b")
    key = ["--key", str(keys / "evaluator.pem")]
    assert kernels(["sign", str(library), "--definition", "no_such", *key]) == 2
    assert kernels(["sign", str(library), "--definition", DEFINITION, *key]) == 0
    promoter = ["--key", str(keys / "promoter.pem")]
    mixed = ["put", str(tmp_path / "k"), "--manifest", f"{library}.json", "--library", str(other), *promoter]
    assert kernels([*mixed, "--pool", "p"]) == 2
    assert "the manifest is of" in capsys.readouterr().err
    unnamed = [
        "put",
        str(tmp_path / "k"),
        "--manifest",
        f"{library}.json",
        "--library",
        str(library),
        *promoter,
    ]
    assert kernels(unnamed) == 2
    assert "name its pool with --pool" in capsys.readouterr().err
    (keys / "promoter.pem").chmod(0o644)
    assert kernels(["clear", str(tmp_path / "k"), *promoter, "--pool", "p"]) == 2
    assert "is open to others" in capsys.readouterr().err
    assert kernels(["status", str(tmp_path / "k")]) == 3


async def test_what_is_no_artifact_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    digest = folder.put(b"{}", "json")
    with pytest.raises(Refused, match="is no signed manifest: manifest: Field required"):
        await folder.manifest(digest)
    path = tmp_path / "kernels" / f"{digest}.so"
    path.write_bytes(b"other")
    with pytest.raises(Refused, match="holds other bytes, of digest d9298a10d1b0"):
        await folder.library(digest)
    path.write_bytes(b"\0" * (4 << 20) + b"!")
    with pytest.raises(Refused, match="has more than 4194304 bytes"):
        await folder.library(digest)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Refused, match="is no regular file"):
        await folder.library(digest)
    with pytest.raises(Refused, match="is no digest"):
        await folder.library("../../etc/passwd")
    with pytest.raises(NotThere, match="No such file"):
        await folder.library("0" * 64)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", json.dumps({"pool": "p"}).encode()])
def test_a_desired_state_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = KernelFolder(tmp_path)
    assert folder.desired() is None
    assert folder.stamp() is None
    folder.desired_path.write_bytes(content)
    with pytest.raises(Refused, match=r"desired\.json is no desired state"):
        folder.desired()


def test_what_is_written_is_never_seen_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = KernelFolder(tmp_path)
    folder.quarantine("0" * 64, "first")

    def fails(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no room"):
        folder.quarantine("0" * 64, "second")
    assert (tmp_path / "quarantine" / ("0" * 64)).read_text() == "first\n"
    assert folder.quarantined({"0" * 64, "1" * 64}) == {"0" * 64}
