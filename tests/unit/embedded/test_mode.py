"""What `--mode` says to the compiler, and what its absence says."""

from pathlib import Path

import pytest

from polymorph.compiler.settings import CompilerSettings
from polymorph.embedded import secrets
from polymorph.embedded.cli import main
from polymorph.embedded.folder import DataFolder
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
