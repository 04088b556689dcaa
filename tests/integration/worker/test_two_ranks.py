"""Several ranks of one engine change kernels at one step, or none of them does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from polymorph.engine.launch import EngineLaunch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MODEL = ROOT / "models" / "tiny-dense"
SOURCE = ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp"
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"


def _build(target: Path, *defines: str) -> Path:
    flags = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
    flags += ["-fno-exceptions", "-fno-rtti", f"-I{ABI}", *defines]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(target)], check=True)
    return target


def _first_value_of_rank_1() -> str:
    """The bits of the first weight that rank 1 alone holds: its half of a layer that is split by columns."""
    weight = load_file(MODEL / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float()
    half = weight[:, weight.shape[1] // 2 :].contiguous()
    return hex(int.from_bytes(half[0, :1].numpy().tobytes(), "little"))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.real
def test_two_ranks_change_at_one_step_or_not_at_all(tmp_path: Path) -> None:
    library = _build(tmp_path / "both.so")
    lame = _build(tmp_path / "lame.so", f"-DREFUSES_FIRST={_first_value_of_rank_1()}u")
    told = tmp_path / "result.json"
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(core) for core in (cores * 2)[:2])
    done = subprocess.run(
        [sys.executable, str(HERE / "two_ranks.py"), str(MODEL), str(library), str(lame), str(told)],
        env={**os.environ, **EngineLaunch(MODEL).environment(), "VLLM_CPU_OMP_THREADS_BIND": binding},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert told.exists(), done.stderr[-4000:]
    found = json.loads(told.read_text())
    assert found["running"], "the stream ended before the last change: it proves nothing"
    assert len(found["served"]) == 2
    assert found["served"][0] == found["served"][1] > 0
    assert found["swapped"][:24] == found["native"]
    assert found["refusal"].startswith("rank 1 of 2:")
    assert "pm_pack refused" in found["refusal"]
    artifacts = [{binding["artifact"] for binding in rank} for rank in found["engaged"]]
    assert artifacts == [{"both-ranks"}] * 2
    assert found["after"] == found["native"]
