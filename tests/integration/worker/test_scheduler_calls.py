"""Salt and scheduling policy on vLLM's own classes, beside a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine]


def test_salt_and_policy_on_vllms_own_requests() -> None:
    script = Path(__file__).with_name("scheduler_calls.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "done"
