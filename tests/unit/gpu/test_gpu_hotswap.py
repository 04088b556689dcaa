"""The benchmark for a machine with a GPU: what it says without one, and its course on doubles of CUDA."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu_block, gpu_hotswap
from tests.doubles.gpu_graphs import FakeDevice

from polymorph.engine.gpu import ops
from polymorph.engine.gpu.artifact import TritonKernel
from polymorph.engine.gpu.slots import SlotTable, Table

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NOT_THERE = {"pydantic", "vllm", "nats", "cryptography", "safetensors", "fastapi", "numpy.f2py"}


def test_it_starts_from_a_checkout_with_torch_alone_and_wants_a_gpu() -> None:
    program = (
        "import json, runpy, sys\n"
        "try: runpy.run_path('benchmarks/gpu_hotswap.py', run_name='__main__')\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted({n.split('.')[0] for n in sys.modules})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    assert (code, said.partition(":")[0]) == (2, "no CUDA device")
    assert not NOT_THERE & set(modules)


class FakeEvent:
    """Measures a microsecond between any two."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 0.001


@pytest.fixture
def bench(slots: SlotTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_hotswap.Bench:
    monkeypatch.setattr(torch.cuda, "Stream", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for module in (gpu_block, gpu_hotswap):
        monkeypatch.setattr(module, "BUCKETS", (1, 2))
    block = gpu_block.Block(torch.float32, "cpu", hidden=16, inner=8, layers=1)
    return gpu_hotswap.Bench(block, tmp_path, FakeDevice(slots), slots)


def test_outputs_of_the_block_are_those_of_the_reference_and_a_wrong_one_is_found(
    bench: gpu_hotswap.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.graphs.engage(Table())
    serving = gpu_block.Serving(bench.graphs, bench.block)
    for _ in range(4):
        serving._request()
    assert (int(serving.wrong), serving.runs) == (0, 4)
    monkeypatch.setattr(ops, "NATIVE", ops.NATIVE | {"silu_and_mul": lambda x: x.chunk(2, dim=-1)[1]})
    serving._request()
    assert int(serving.wrong) == 1


@pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_its_whole_course_on_doubles_of_cuda(
    bench: gpu_hotswap.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, one_at_a_time = TritonKernel.launch, threading.RLock()  # the interpreter knows no threads

    def alone(*arguments: Any) -> None:
        with one_at_a_time:
            launch(*arguments)

    monkeypatch.setattr(TritonKernel, "launch", alone)
    assert max(bench.load().values()) <= 1.0
    bench.graphs.engage(Table())
    # What only a GPU refuses, the double of it does not.
    monkeypatch.setattr(bench, "refuse", lambda: None)
    done = gpu_hotswap.swaps(bench, 4, roll_back_each=2, quiet_s=0.5)
    assert (done["swaps"], done["beside"], done["wrong"], bench.problems) == (4, 4, 0, [])
    assert gpu_hotswap.drained(bench)["paused_s"][0] > 0
    assert gpu_hotswap.replay_times(bench, 1)["mixed"] == {1: 0.1, 2: 0.1}
    assert set(gpu_hotswap.eager_overhead(bench)) == {"plain_us", "empty_slot_us", "engaged_slot_us"}
    assert bench.problems == []
