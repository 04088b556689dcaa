"""The worker extension on a GPU and its hooks into vLLM, on doubles: order of trying, refusals, what is dropped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.gpu.conftest import DEFINITION, scaling_kernel

from polymorph.engine.gpu import extension, hooks, ops, vllm_graphs
from polymorph.engine.gpu.artifact import TritonKernel
from polymorph.engine.gpu.counters import Counters
from polymorph.engine.gpu.extension import Engaging, GpuExtension
from polymorph.engine.gpu.recapture import Recaptured
from polymorph.engine.gpu.selftest import Case, SelfTestFailed
from polymorph.engine.gpu.slots import SlotTable
from polymorph.engine.gpu.vllm_graphs import VllmGraphs
from polymorph.engine.hooks.hook import HookMissing


def document(factor: int, definition: str = DEFINITION, max_m: int = 8) -> dict[str, Any]:
    kernel = scaling_kernel(factor)
    return {
        "definition": definition, "min_m": 1, "max_m": max_m, "path": f"{factor}.py", "artifact": kernel.artifact,
    }  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with a kernel, in order. Kernel 13 fails its self-test."""
    done: list[str] = []

    def load(path: Path, operation: str) -> TritonKernel:
        done.append(f"load {path.stem}")
        return scaling_kernel(float(path.stem))

    def in_process(case: Case) -> float:
        done.append(f"try {Path(case.path).stem} {case.operation} {case.sizes} {case.dtype} {case.max_m}")
        if case.path == "13.py":
            raise SelfTestFailed("13 uses 7 of its tolerance: at most 1")
        return 0.5

    def recapture(graphs: Any, slots: SlotTable, table: Any) -> Recaptured:
        done.append("recapture")
        return Recaptured("beside", 1.5, slots.engage(table))

    monkeypatch.setattr(extension, "load", load)
    monkeypatch.setattr(extension.selftest, "in_process", in_process)
    monkeypatch.setattr(extension.selftest, "check", lambda kernel, case: done.append("compile"))
    monkeypatch.setattr(extension, "recapture", recapture)
    monkeypatch.setattr(extension, "VllmGraphs", lambda worker: "graphs")
    monkeypatch.setattr(vllm_graphs, "vllm_module", lambda name: SimpleNamespace(_mode="error"))
    return done


@pytest.fixture
def engaging(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Engaging:
    made = Engaging(Counters("cpu"))
    monkeypatch.setattr(extension, "_ENGAGING", made)
    return made


def test_without_a_device_it_says_so() -> None:
    answer = GpuExtension().gpu_prepare([])
    assert (answer["ok"], answer["reason"]) == (False, "no CUDA device was there when the engine started")


def test_a_kernel_is_tried_in_another_process_before_it_runs_here_and_once(
    engaging: Engaging, log: list[str]
) -> None:
    assert GpuExtension().gpu_prepare([document(3)])["ok"]
    assert log == ["load 3", "try 3 silu_and_mul (16,) float32 8", "compile"]
    answer = GpuExtension().gpu_engage([document(3)])
    assert log[3:] == ["recapture"]
    assert (answer["ok"], answer["way"], answer["inverse"]) == (True, "beside", [])
    assert engaging.slots.engaged.bindings[0].artifact == f"{3:064x}"


def test_what_is_engaged_no_more_is_dropped_and_tried_again_when_it_comes_back(
    engaging: Engaging, log: list[str]
) -> None:
    for factor in (3, 5):
        assert GpuExtension().gpu_engage([document(factor)])["ok"]
    del log[:]
    answer = GpuExtension().gpu_engage([document(3)])
    assert [entry.split()[0] for entry in log] == ["load", "try", "compile", "recapture"]
    assert answer["inverse"][0]["artifact"] == f"{5:064x}"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ([document(13)], "13 uses 7 of its tolerance"),
        ([document(3, "moe_e8")], "no slot on a GPU serves moe_e8"),
        ([document(3), document(5)], "claim M up to"),
        ([document(3, max_m=7)], "cuts a bucket"),
    ],
)
def test_a_refusal_is_an_answer_and_nothing_changes(
    engaging: Engaging, log: list[str], wanted: list[dict[str, Any]], reason: str
) -> None:
    before = engaging.slots.engaged
    answer = GpuExtension().gpu_engage(wanted)
    assert not answer["ok"]
    assert reason in answer["reason"]
    assert engaging.slots.engaged is before
    assert "recapture" not in log


def test_what_served_can_be_read(engaging: Engaging, log: list[str]) -> None:
    GpuExtension().gpu_engage([document(3)])
    with ops.serving(engaging.slots) as namespace:
        namespace.silu_and_mul(torch.ones(4, 32))
    answer = GpuExtension().gpu_read()
    assert [each["calls"] for each in answer["served"] if each["bucket"] == 4] == [1]
    assert answer["engaged"][0]["artifact"] == f"{3:064x}"


def test_a_slot_whose_place_in_vllm_is_gone_stays_off_and_is_told(
    slots: SlotTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def installed(_: Any) -> None:
        monkeypatch.setitem(ops.NATIVE, "silu_and_mul", ops.NATIVE["silu_and_mul"])

    monkeypatch.setattr(hooks, "vllm_module", lambda name: SimpleNamespace(__name__=name))
    monkeypatch.setitem(hooks.HOOKS, "silu_and_mul", installed)
    assert hooks.install(["rms_norm", "silu_and_mul"], slots) == ["silu_and_mul"]
    assert "slot rms_norm stays off" in caplog.text
    with pytest.raises(ValueError, match="no slot on a GPU is named moe"):
        hooks.install(["moe"], slots)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of the first model runner, with one wrapper that holds a graph."""
    wrapper = SimpleNamespace(concrete_cudagraph_entries={"size": "old"}, graph_pool="old pool")
    modules = {
        "vllm.compilation.cuda_graph": SimpleNamespace(
            CUDAGraphWrapper=SimpleNamespace(_all_instances=[wrapper])
        ),
        "vllm.compilation.breakable_cudagraph": SimpleNamespace(
            BreakableCUDAGraphWrapper=SimpleNamespace(_all_instances=[])
        ),
        "vllm.platforms": SimpleNamespace(
            current_platform=type("Platform", (), {"_global_graph_pool": None})()
        ),
        "vllm.compilation.monitor": SimpleNamespace(set_cudagraph_capturing_enabled=lambda _: None),
        "vllm.utils.jit_monitor": SimpleNamespace(_mode="error"),
    }
    monkeypatch.setattr(vllm_graphs, "vllm_module", modules.__getitem__)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "new pool")
    free = iter([9 << 30, 5 << 30, 4 << 30])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    seen: list[str] = []

    class Saved:
        def __enter__(self) -> None:
            seen.append("saved")

        def __exit__(self, *_: object) -> None:
            seen.append("restored")

    def capture_model() -> None:
        seen.append(f"captured, monitor {modules['vllm.utils.jit_monitor']._mode}")
        wrapper.concrete_cudagraph_entries["size"] = "new"

    runner = SimpleNamespace(capture_model=capture_model, preserve_serving_state=Saved)
    configuration = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False))
    return SimpleNamespace(model_runner=runner, vllm_config=configuration, wrapper=wrapper, seen=seen)


def test_the_first_runner_captures_into_a_new_pool_with_its_block_tables_saved(worker: Any) -> None:
    graphs = VllmGraphs(worker, set_mib=1024)
    assert graphs.refusal() is None
    held = graphs.take()
    assert (worker.wrapper.concrete_cudagraph_entries, worker.wrapper.graph_pool) == ({}, "new pool")
    graphs.capture()
    assert worker.seen == ["saved", "captured, monitor warn", "restored"]
    assert not graphs.fits(), "a set takes 4 GiB, as was measured, and 4 are free, of which 0.5 are to spare"
    graphs.take()
    graphs.put(held)
    assert worker.wrapper.concrete_cudagraph_entries == {"size": "old"}
    assert worker.wrapper.graph_pool == "old pool"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"encoder_cudagraph_manager": object()}, "multimodal encoder"),
        ({"preserve_serving_state": None}, "no preserve_serving_state"),
    ],
)
def test_an_engine_that_cannot_is_refused_by_name(worker: Any, change: dict[str, Any], reason: str) -> None:
    for attribute, value in change.items():
        setattr(worker.model_runner, attribute, value)
    assert reason in (VllmGraphs(worker).refusal() or "")
    worker.vllm_config.parallel_config.use_ubatching = True
    assert VllmGraphs(worker).refusal()


def test_a_wrapper_that_changed_is_named(worker: Any) -> None:
    del worker.wrapper.graph_pool
    assert "has no graph_pool" in (VllmGraphs(worker).refusal() or "")
    with pytest.raises(HookMissing):
        VllmGraphs(worker).take()
