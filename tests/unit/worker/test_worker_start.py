"""What a worker says when it cannot start: one clear line and exit code 2, before any model is loaded."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polymorph.events.subjects import pool_id
from polymorph.worker.settings import WorkerSettings


def _start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    named = {f"POLYMORPH_WORKER_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-m", "polymorph.worker"],
        env={**os.environ, **named},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    done = _start(tmp_path, MODEL=str(tmp_path))
    assert done.returncode == 2
    assert "is no model folder" in done.stderr


def test_an_unknown_setting_value(tmp_path: Path, model: Path) -> None:
    done = _start(tmp_path, MODEL=str(model), PORT="0")
    assert done.returncode == 2
    assert "port" in done.stderr


def test_a_taken_port(tmp_path: Path, model: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        done = _start(tmp_path, MODEL=str(model), PORT=str(held.getsockname()[1]))
    assert done.returncode == 2
    assert "name another port" in done.stderr


def test_names_follow_from_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    settings = WorkerSettings(model=model)
    assert settings.served_name() == "model"
    assert settings.pool_name() == pool_id("model")
    assert settings.url() == "http://127.0.0.1:8100"
    assert settings.launch().slots == ("linear", "moe", "attention", "sampling")
    assert WorkerSettings(model=model, slots="").launch().slots == ()
