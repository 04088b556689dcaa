"""Slots in the graph that vLLM compiled: kernels are engaged between two steps, and the graph is never built again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polymorph.engine.launch import EngineLaunch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]


def _build(source: Path, target: Path) -> Path:
    flags = [*FLAGS, "-fno-exceptions", "-fno-rtti", "-fno-math-errno", f"-I{ABI}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
    return target


@pytest.mark.engine
@pytest.mark.real
def test_a_compiled_engine_runs_kernels_for_linear_layers_and_norms(tmp_path: Path) -> None:
    linear = _build(ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp", tmp_path / "linear.so")
    norm = _build(HERE / "norm.cpp", tmp_path / "norm.so")
    model = ROOT / "models" / "tiny-dense"
    told = tmp_path / "result.json"
    launch = EngineLaunch(model=model, slots=("linear", "rms_norm"))
    done = subprocess.run(
        [sys.executable, str(HERE / "compiled_slots.py"), str(model), str(linear), str(norm), str(told)],
        env={**os.environ, **launch.environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(told.read_text())
    kinds = {re.split(r"_[nh]\d", name)[0] for name in result["names"]}
    assert kinds == {"gemm", "rms_norm", "fused_add_rms_norm"}
    served = result["counters"]["artifacts"]
    assert served["linear"]["served"]["calls"] > 0
    assert served["norm"]["served"]["calls"] > 0
    for name, counts in result["counters"]["definitions"].items():
        assert counts["native"]["calls"] == 0, name
    assert result["tokens"]["tuned"] == result["tokens"]["empty"]
    assert result["tokens"]["again"] == result["tokens"]["empty"]
