"""Experts of a real engine: kernels chosen by histogram, tokens the same, weights that are loaded anew."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "models" / "tiny-moe"


def _script() -> Any:
    found = importlib.util.spec_from_file_location("moe_slots", HERE / "moe_slots.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.engine
@pytest.mark.real
@pytest.mark.slow
def test_an_engine_runs_kernels_for_its_experts_by_their_load(tmp_path: Path) -> None:
    told = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "moe_slots.py"), str(MODEL), str(told)],
        env={**os.environ, **_script().launch_of(str(MODEL)).in_process_environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(told.read_text())
    config = json.loads((MODEL / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    assert result["described"]["definitions"][result["definition"]] == layers
    assert result["described"]["missing"] == {}
    empty = result["empty"]["definitions"][result["definition"]]
    assert empty["native"]["calls"] > 0
    pairs = [sum(layer) for layer in empty["experts"]]
    assert [len(layer) for layer in empty["experts"]] == [experts] * layers
    assert min(pairs) == max(pairs) > 0
    assert pairs[0] % config["num_experts_per_tok"] == 0
    tuned = result["tuned"]
    assert tuned["definitions"][result["definition"]]["native"]["calls"] == 0
    for artifact in result["artifacts"]:
        assert tuned["artifacts"][artifact]["served"]["calls"] > 0, "the histogram never chose it"
        assert tuned["artifacts"][artifact]["errors"] == 0
    assert result["engaged_after_reload"] == []
    tokens = result["tokens"]
    assert tokens["tuned"] == tokens["empty"]
    assert tokens["reloaded"] == tokens["empty"]
    assert tokens["again"] == tokens["empty"]
