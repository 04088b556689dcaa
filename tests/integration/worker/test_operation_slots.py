"""Slots through vLLM's own layers in eager mode: bit for bit the native code while empty, and by kernels of the catalogue."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOTS = "linear,rms_norm,silu_and_mul,rotary,attention,sampling"
NAMES = {
    "rms_norm_h64_f32",
    "fused_add_rms_norm_h64_f32",
    "silu_and_mul_d32_f32",
    "rotary_q3_k2_d16_r16_neox_f32",
    "rotary_q3_k2_d16_r8_neox_f32",
    "rotary_q3_k2_d16_r16_gptj_f32",
    "qk_norm_rotary_q3_k2_d16_r16_neox_f32",
    "attn_decode_q6_kv2_d32_b32_f32",
    "top_k_top_p_v83_f32",
}


@pytest.mark.engine
def test_operations_run_natively_and_by_kernels(tmp_path: Path) -> None:
    told = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "operation_slots.py"), str(told)],
        env={**os.environ, "POLYMORPH_SLOTS": SLOTS},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(told.read_text())
    assert result["missing"] == {}
    assert set(result["names"]) == NAMES
    # The norms' native code is vLLM's operator in C++, which rounds otherwise than its code in Python.
    different = {name for name, equal in result["equal"].items() if not equal}
    assert different <= {"rms_norm", "fused_add_rms_norm", "attention"}
    for name in NAMES:
        assert result["empty"]["definitions"][name]["native"]["calls"] == 1, name
        assert result["tuned"]["definitions"][name]["native"]["calls"] == 0, name
        assert result["tuned"]["definitions"][name]["by_m"], name
    served = [each["served"]["calls"] for each in result["tuned"]["artifacts"].values()]
    assert sum(served) == len(NAMES)
    assert "does not just normalise" in result["refusals"]["scaled"]
    assert "takes self, input, not self, positions" in result["refusals"]["stranger"]
    assert "has a forward of its own" in result["refusals"]["own way"]
    assert any("polymorph.rotary" in target for target in result["in a graph"])
    assert result["captured"] == {
        "positions": [5],
        "query": [5, 48],
        "key": [5, 32],
        "cos_sin_cache": [20, 8],
    }
