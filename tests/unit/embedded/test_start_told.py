"""What is told while a start takes its minutes: phases in our own words, and a time only while it is so."""

import time
from pathlib import Path

import pytest

from polymorph.embedded.child import Child, ChildSpec
from polymorph.embedded.phases import phase
from polymorph.worker.domain.patience import start_told

WARM = "(Worker pid=9) INFO 11-30 09:43:48 [cpu_model_runner.py:87] Warming up model for the compilation...\n"
STRAY = [
    "2026-11-30 15:54:00,394 INFO    worker polymorph.worker: settings {'instance': 'worker-0'}",
    "2026-11-30 15:54:25,710 INFO    worker vllm.triton_utils.importing: Triton not installed or not compatible",
    "(Main pid=1) INFO 11-30 15:55:00 [async_llm.py:152] AsyncLLM created with log_stats=False, but",
    "Traceback (most recent call last):",
    "",
]


@pytest.mark.parametrize("line", STRAY)
def test_a_line_of_no_known_kind_is_not_shown(tmp_path: Path, line: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"{line}\n")
    assert phase(log) == ""
    log.write_text(f"{WARM}{line}\n")
    assert phase(log) == "compiling the model and warming it up"


def test_the_phase_is_of_this_life_of_the_process(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(WARM)
    begun = log.stat().st_size
    assert phase(log, begun) == ""
    with log.open("a") as file:
        file.write("(W pid=9) INFO 11-30 15:56:31 [cpu_model_runner.py:68] Starting to load model /m...\n")
    assert phase(log, begun) == "loading the weights"


def test_a_log_that_is_not_there_shows_nothing(tmp_path: Path) -> None:
    assert phase(tmp_path / "none") == ""


async def never() -> bool:
    return False


def started(log: Path, waited_s: float, usual_s: float) -> Child:
    spec = ChildSpec("one", ("true",), {}, log, never, usual_start_s=usual_s)
    return Child(spec, lambda _: None, since=time.monotonic() - waited_s)


def test_the_usual_time_is_told_only_while_it_is_so(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    log.write_text(WARM)
    now = "compiling the model and warming it up"
    expected = f"{now}, up to 3 min where the model is compiled anew"
    assert started(log, 20, 180).start_told() == expected
    assert started(log, 681, 180).start_told() == f"{now}, longer than usual: see {log}"
    assert started(tmp_path / "none", 20, 60).start_told() == ""


def test_the_worker_says_the_same_in_its_log() -> None:
    assert start_told(15) == (
        "the engine is starting (15 s so far; up to 3 minutes where the model is compiled anew)"
    )
    late = start_told(681)
    assert "681 s so far; longer than usual" in late
    assert "up to" not in late
