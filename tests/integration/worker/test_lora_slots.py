"""LoRA beside slots: a kernel computes the layer's product, vLLM adds the adapter's, and outputs are as without it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"


def _script() -> Any:
    found = importlib.util.spec_from_file_location("lora_slots", HERE / "lora_slots.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.engine
@pytest.mark.real
@pytest.mark.slow
def test_an_adapter_adds_to_what_a_kernel_computes(tmp_path: Path) -> None:
    linear = tmp_path / "linear.so"
    flags = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
    flags += ["-fno-exceptions", "-fno-rtti", "-fno-math-errno", f"-I{ABI}"]
    source = ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp"
    subprocess.run(["g++", *flags, str(source), "-o", str(linear)], check=True)
    model = str(ROOT / "models" / "tiny-dense")
    done = subprocess.run(
        [sys.executable, str(HERE / "lora_slots.py"), model, str(linear), str(tmp_path)],
        env={**os.environ, **_script().launch_of(model).environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["told"] == {"LoRA": "supported"}
    assert found["names"]
    assert found["adapted"] != found["bare"]
    assert found["tuned"] == found["adapted"]
    assert found["bare tuned"] == found["bare"]
    for name in found["names"]:
        assert found["counters"]["artifacts"][f"test-{name}"]["served"]["calls"] > 0, name
        assert found["counters"]["artifacts"][f"test-{name}"]["errors"] == 0, name
