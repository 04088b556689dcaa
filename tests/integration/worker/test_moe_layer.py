"""The experts' slot in vLLM's own layer: bit for bit its code while empty, and kernels chosen by the histogram."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.engine
def test_a_layers_experts_run_natively_and_by_kernels(tmp_path: Path) -> None:
    told = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "moe_layer.py"), str(told)],
        env={**os.environ, "POLYMORPH_SLOTS": "moe"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(told.read_text())
    name = "moe_e4_k2_h64_i32_f32"
    assert result["definitions"] == {name: 1}
    assert result["missing"] == {}
    assert result["empty"]["native"]["calls"] == 2
    assert result["empty"]["experts"] == [[6, 4, 3, 3]]
    assert result["stock and empty"] == {"skewed": 0.0, "even": 0.0}
    assert result["tuned"]["definitions"][name]["native"]["calls"] == 0
    for artifact in result["artifacts"]:
        assert result["tuned"]["artifacts"][artifact]["served"]["calls"] == 1
    assert max(result["stock and tuned"].values()) < 1e-5
    assert result["engaged after a reload"] == []
    assert result["layers after a reload"] == 1
    assert result["fresh and reloaded"] == {"skewed": 0.0, "even": 0.0}
    assert max(result["fresh and reloaded, tuned"].values()) < 1e-5
