"""Slots in the graph that vLLM compiled: kernels are engaged between two steps, and the graph is never built again."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
_EVERYWHERE = {"gemm", "rms_norm", "fused_add_rms_norm", "qk_norm_rotary", "attn_decode", "top_k_top_p"}
OPERATIONS = {"tiny-dense": _EVERYWHERE | {"silu_and_mul"}, "tiny-moe": _EVERYWHERE | {"moe"}}
"""What the small models have. Their heads' norms and rotation are one call, so they have no rotation alone."""


def _script() -> Any:
    found = importlib.util.spec_from_file_location("compiled_slots", HERE / "compiled_slots.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.engine
@pytest.mark.real
@pytest.mark.parametrize("name", ["tiny-dense", pytest.param("tiny-moe", marks=pytest.mark.slow)])
def test_a_compiled_engine_runs_a_kernel_in_every_slot(tmp_path: Path, name: str) -> None:
    linear, told = tmp_path / "linear.so", tmp_path / "result.json"
    source = ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp"
    flags = [*FLAGS, "-fno-exceptions", "-fno-rtti", "-fno-math-errno", f"-I{ABI}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(linear)], check=True)
    model = str(ROOT / "models" / name)
    done = subprocess.run(
        [sys.executable, str(HERE / "compiled_slots.py"), model, str(linear), str(told)],
        env={**os.environ, **_script().launch_of(model).environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(told.read_text())
    assert result["missing"] == {}
    kinds = {re.split(r"_[a-z]\d", definition)[0] for definition in result["artifacts"]}
    assert kinds == OPERATIONS[name]
    counters = result["counters"]
    for definition, artifact in result["artifacts"].items():
        assert counters["definitions"][definition]["native"]["calls"] == 0, definition
        assert counters["artifacts"][artifact]["served"]["calls"] > 0, definition
        assert counters["artifacts"][artifact]["errors"] == 0, definition
    assert result["tokens"]["tuned"] == result["tokens"]["empty"]
    assert result["tokens"]["again"] == result["tokens"]["empty"]
