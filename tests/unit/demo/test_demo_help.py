"""What `make demo ARGS=--help` says before somebody waits for a quarter of an hour."""

import sys

import pytest
from benchmarks.demo import __main__ as demo


def test_the_help_tells_how_long_it_takes_and_what_its_exit_codes_mean(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make demo", "--help"])
    with pytest.raises(SystemExit):
        demo.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "about 12 minutes; the first time about 18" in told
    for meaning in ("0 a promoted kernel", "3 none", "1 a request failed", "2 it cannot start"):
        assert meaning in told
    assert "must be free (8000)" in told


def test_what_cannot_start_is_refused_in_one_line_before_anything_starts(monkeypatch, capsys, tmp_path):
    data = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["make demo", "--model", str(tmp_path), "--data", str(data)])
    assert demo.main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("make demo: ")
    assert "holds no config.json" in told.err
    assert told.err.count("\n") == 1
    assert not data.exists()
