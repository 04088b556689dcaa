"""What `make` says where nothing is set up, and what git leaves out."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("target", ["status", "down"])
def test_before_set_up_it_is_named(tmp_path: Path, target: str) -> None:
    done = make(target, f"BIN={tmp_path}")
    assert done.returncode == 2
    assert "run make setup" in done.stderr
    assert "No such file" not in done.stderr


def test_set_up_does_not_ask_for_the_model_that_it_fetches() -> None:
    done = make("-n", "setup")
    assert "doctor.py --skip port --skip model" in done.stdout, done.stderr


def test_git_leaves_out_what_an_interrupted_fetch_leaves() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    command = ["git", "check-ignore", "-q", "models/.smollm2-135m-instruct-fetching-x1y2/work/model.gguf"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
