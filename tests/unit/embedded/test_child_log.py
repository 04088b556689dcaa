from pathlib import Path

import pytest

from polymorph.embedded.child import last_line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "2026-11-30 10:35:44,875 INFO    worker polymorph.worker.app: the engine is starting",
            "the engine is starting",
        ),
        ("(Worker pid=9) INFO 11-30 09:43:48 [cpu_model_runner.py:87] Warming up model", "Warming up model"),
        ("(Worker pid=9) something else", "something else"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("", ""),
    ],
)
def test_the_end_of_a_log_is_shown_without_its_head(tmp_path: Path, line: str, shown: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"before\n{line}\n" if line else "")
    assert last_line(log) == shown


def test_a_log_that_is_not_there_shows_nothing(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""
