"""The norms' slots through vLLM's own operators, native and with a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ABI = HERE.parents[2] / "libs" / "polymorph" / "kernels" / "abi"


@pytest.mark.engine
def test_norms_run_natively_and_by_a_kernel(tmp_path: Path) -> None:
    library = tmp_path / "norm.so"
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib", f"-I{ABI}"]
    flags += ["-fno-exceptions", "-fno-rtti", "-fno-math-errno"]
    subprocess.run(["g++", *flags, str(HERE / "norm.cpp"), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "norm_slots.py"), str(library)],
        env={**os.environ, "POLYMORPH_SLOTS": "linear,rms_norm"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counters = json.loads(done.stdout.splitlines()[-1])
    assert counters["artifacts"]["norm"]["served"]["calls"] == 2
    for name in ("rms_norm_h64_f32", "fused_add_rms_norm_h64_f32"):
        assert counters["definitions"][name]["native"]["calls"] == 1
