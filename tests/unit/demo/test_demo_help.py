"""What `make demo ARGS=--help` says before somebody waits for a quarter of an hour."""

import sys

import pytest
from benchmarks.demo import __main__ as demo


def test_the_help_tells_how_long_it_takes_and_what_its_exit_codes_mean(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make demo", "--help"])
    with pytest.raises(SystemExit):
        demo.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "about 12 minutes; the first time about 17" in told
    for meaning in ("0 a promoted kernel", "3 none", "1 a request failed", "2 it cannot start"):
        assert meaning in told
    assert "must be free (8000)" in told
