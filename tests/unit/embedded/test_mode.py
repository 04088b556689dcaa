"""What `--mode` says to the compiler, and what its absence says."""

import json
import time
from pathlib import Path

import pytest

from polymorph.compiler.settings import CompilerSettings
from polymorph.embedded import secrets
from polymorph.embedded.cli import main
from polymorph.embedded.folder import DataFolder, free_port
from polymorph.embedded.options import UpOptions
from polymorph.embedded.services import Services
from polymorph.events.state import Mode


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> UpOptions:
    wanted: list[UpOptions] = []
    monkeypatch.setattr("polymorph.embedded.up.up", wanted.append)
    assert main(["up", *arguments]) == 0
    return wanted[0]


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [((), None), (("--mode", "canary"), Mode.CANARY), (("--mode", "observe"), Mode.OBSERVE)],
)
def test_only_a_mode_that_was_given_reaches_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], mode: Mode | None
) -> None:
    options = asked(monkeypatch, "--data", str(tmp_path), *arguments)
    folder = DataFolder(tmp_path)
    folder.make()
    stages = Services(options, folder, secrets.ensure(folder)).stages(lambda: None)  # type: ignore[arg-type, return-value]
    compiler = next(spec for stage in stages for spec in stage if spec.name == "compiler")
    for name, value in compiler.environment.items():
        monkeypatch.setenv(name, value)
    settings = CompilerSettings()
    assert settings.mode is mode
    assert settings.default_mode is Mode.OBSERVE


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "as this data folder has it, observe where it is new"),
        (("--mode", "canary"), "canary (given)"),
        (("--no-tune",), "none, as nothing tunes"),
    ],
)
def test_the_first_line_claims_no_mode_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    assert asked(monkeypatch, *arguments).told_mode == told


def test_a_mode_that_cannot_be_read_is_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NATS is said to be ready, and nobody answers there."""
    folder = DataFolder(tmp_path)
    folder.make()
    secrets.ensure(folder)
    facts = {
        "nats": f"nats://127.0.0.1:{free_port()}",
        "pool": "p",
        "mode": "canary",
        "url": "u",
        "model": "m",
    }
    children = {"nats": {"state": "ready", "restarts": 0, "detail": "", "where": ""}}
    with folder.lock():
        folder.write_state({"pid": 1, **facts, "children": children})
        began = time.monotonic()
        assert main(["status", "--data", str(tmp_path), "--json"]) == 0
        assert time.monotonic() - began < 5
        assert json.loads(capsys.readouterr().out)["mode"] is None
        assert main(["status", "--data", str(tmp_path)]) == 0
    assert "mode not known yet" in capsys.readouterr().out
