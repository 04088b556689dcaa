"""What the GPU's slots and the recapture expect of vLLM, against the vLLM that is installed; it needs no GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json, types
import torch, vllm
import vllm.v1.worker.gpu.cudagraph_utils as second
import vllm.v1.worker.gpu_model_runner as first
from vllm import ir
from vllm.config.kernel import IrOpPriorityConfig
from polymorph.engine.gpu import hooks, ops, vllm_graphs
from polymorph.engine.gpu.counters import Counters
from polymorph.engine.gpu.slots import SlotTable

said = {}
said["installed"] = hooks.install(["rms_norm", "fused_add_rms_norm", "silu_and_mul"], SlotTable(Counters("cpu")))
calls = []
for name in ("rms_norm", "fused_add_rms_norm"):
    stock = ops.NATIVE[name]
    ops.replace_native(name, lambda *a, name=name, stock=stock: (calls.append(name), stock(*a))[1])
x, w = torch.randn(3, 64), torch.randn(64)
plain = ir.ops.rms_norm.impls["native"].impl_fn(x, w, 1e-6)
fused = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, x, w, 1e-6)
for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
    op.set_default(["native"])
    op.set_default([hooks.PROVIDER, *op.get_priority()])
said["same"] = [
    torch.equal(ir.ops.rms_norm(x, w, 1e-6), plain),
    all(map(torch.equal, ir.ops.fused_add_rms_norm(x, x, w, 1e-6), fused)),
]
said["calls"] = calls

manager = second.CudaGraphManager.__new__(second.CudaGraphManager)
manager.graphs, manager._graphs_captured, manager.pool = {"old": 1}, True, "old pool"
wrapper = vllm.compilation.cuda_graph.CUDAGraphWrapper.__new__(vllm.compilation.cuda_graph.CUDAGraphWrapper)
wrapper.__dict__ |= {"concrete_cudagraph_entries": {"old": 1}, "graph_pool": "old pool", "runnable": None}
type(wrapper)._all_instances.add(wrapper)
runner = types.SimpleNamespace(cudagraph_manager=manager, speculator=types.SimpleNamespace(m=manager), capture_model=None)
places = list(vllm_graphs.places(runner, lambda: "new pool"))
held = [(place, place.swap(place.empty())) for place in places]
said["places"] = sorted({place.attribute for place in places})
said["fresh"] = [manager.graphs, manager._graphs_captured, manager.pool, wrapper.graph_pool]
for place, value in reversed(held):
    place.swap(value)
said["back"] = [manager.graphs, manager._graphs_captured, manager.pool, wrapper.concrete_cudagraph_entries]
with vllm_graphs.quiet_jit_monitor():
    pass
said["first"] = [hasattr(first.GPUModelRunner, name) for name in ("capture_model", "preserve_serving_state")]
try:
    list(vllm_graphs.places(types.SimpleNamespace(), lambda: None))
except vllm_graphs.HookMissing as error:
    said["missing"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


pytestmark = pytest.mark.slow


def test_the_norms_of_vllm_ir_run_through_the_slot_and_come_out_the_same(said: dict[str, Any]) -> None:
    assert {"rms_norm", "fused_add_rms_norm"} <= set(said["installed"])
    assert said["calls"] == ["rms_norm", "fused_add_rms_norm"]
    assert said["same"] == [True, True]


def test_every_place_that_holds_graphs_is_emptied_and_can_be_put_back(said: dict[str, Any]) -> None:
    wanted = {
        "concrete_cudagraph_entries",
        "graph_pool",
        "_global_graph_pool",
        "graphs",
        "_graphs_captured",
        "pool",
    }
    assert wanted <= set(said["places"])
    assert said["fresh"] == [{}, False, "new pool", "new pool"]
    assert said["back"] == [{"old": 1}, True, "old pool", {"old": 1}]


def test_what_is_missing_is_named(said: dict[str, Any]) -> None:
    assert said["first"] == [True, True]
    assert said["missing"].endswith("has no capture_model")
