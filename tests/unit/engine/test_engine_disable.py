"""What POLYMORPH_DISABLE switches off."""

from pathlib import Path

import pytest

from polymorph.engine.disable import Disabled
from polymorph.engine.launch import EngineLaunch


@pytest.mark.parametrize("text", ["", "0", "false", " "])
def test_nothing(text: str) -> None:
    assert Disabled.read({"POLYMORPH_DISABLE": text}) == Disabled()


@pytest.mark.parametrize("text", ["1", "true", "ALL"])
def test_everything(text: str) -> None:
    assert Disabled.read({"POLYMORPH_DISABLE": text}) == Disabled(everything=True)


def test_slots_by_name_and_a_misspelt_one_is_told() -> None:
    disabled = Disabled.read({"POLYMORPH_DISABLE": "linear, moe"})
    assert disabled == Disabled(slots=frozenset({"linear", "moe"}))
    disabled.check(["linear", "rms_norm", "moe"])
    with pytest.raises(ValueError, match=r"names moe: use 1 for stock code .* linear, rms_norm"):
        disabled.check(["linear", "rms_norm"])


def test_a_launch_leaves_out_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymorph.engine.launch.on_cpu", lambda: True)
    launch = EngineLaunch(model=Path("m"), slots=("linear", "rms_norm"))
    monkeypatch.setenv("POLYMORPH_DISABLE", "linear")
    assert launch.environment()["POLYMORPH_SLOTS"] == "rms_norm"
    assert launch.arguments()["additional_config"]["polymorph"].startswith("rms_norm-")
    for text in ("1", "linear,rms_norm"):
        monkeypatch.setenv("POLYMORPH_DISABLE", text)
        assert launch.arguments() == launch.plain_arguments()
