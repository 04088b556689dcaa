"""`polymorph capture`: what it takes."""

from pathlib import Path

import pytest

from polymorph.embedded import where
from polymorph.embedded.cli import main


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("softmax",), "or name a slot: linear, rms_norm"),
        (("linear", "--calls", "100"), "--calls 100: input should be less than or equal to 64"),
        (("linear", "--seconds", "0"), "--seconds 0.0: input should be greater than 0"),
        (("moe", "--min-m", "9", "--max-m", "8"), "--min-m 9 is more than --max-m 8"),
    ],
)
def test_what_no_worker_takes_is_refused_before_any_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert main(["capture", "take", *arguments, "--data", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err


def test_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["take", "linear"], ["list"]):
        assert main(["capture", *arguments, "--data", str(tmp_path / "data")]) == 2
        assert "name a server with --nats" in capsys.readouterr().err


def test_a_server_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, "_CONNECT_S", 0.2)
    assert main(["capture", "list", "--nats", "nats://127.0.0.1:1"]) == 2
    assert "the bus does not answer" in capsys.readouterr().err
