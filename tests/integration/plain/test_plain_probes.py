"""Each thing that a hook's probe relies on is broken in vLLM, one after the other: that slot is off, and no other."""

import asyncio
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polymorph.engine.hooks import HOOKS, graphs, spin, steps
from polymorph.engine.hooks.hook import hindrance
from polymorph.engine.installation import Installation
from polymorph.engine.plain import front, server

pytestmark = pytest.mark.engine


def _probe_front() -> None:
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401 - as a server's process has

    front.probe()


PROBES: dict[str, Callable[[], Any]] = {
    **{name: each.probe for name, each in HOOKS.items()},
    # What is no slot, and is probed all the same.
    "graphs": graphs.probe,
    "spin": spin.probe,
    "steps": steps.probe,
    "front": _probe_front,
}


@pytest.fixture(scope="module")
def breaking() -> ModuleType:
    spec = importlib.util.spec_from_file_location("polymorph_breaking", Path(__file__).parent / "breaking.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def vllm_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an installation changes in vLLM is undone after the test."""
    from vllm import ir
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    changed = (
        (utils, "dispatch_cpu_unquantized_gemm"),
        (IrOpPriorityConfig, "set_default"),
        (VllmConfig, "compute_hash"),
        (SpinCondition, "__init__"),
        (SpinCondition, "wait"),
        (WorkerWrapperBase, "execute_model"),
        (Worker, "sample_tokens"),
    )
    for holder, name in changed:
        monkeypatch.setattr(holder, name, getattr(holder, name))
    yield
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.impls.pop("polymorph", None)


def test_every_hook_finds_what_it_wants_in_this_vllm() -> None:
    assert {name: hindrance(probe) for name, probe in PROBES.items()} == dict.fromkeys(PROBES)


@pytest.mark.parametrize("name", PROBES)
def test_whatever_a_probe_relies_on_is_missed_by_it_and_by_no_other(
    name: str, breaking: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    relied_on = {each: breaking.relied_on(probe, monkeypatch) for each, probe in PROBES.items()}
    assert relied_on[name], f"the probe of {name} looks at nothing through hooks/hook.py"
    for thing in relied_on[name]:
        with monkeypatch.context() as patch:
            thing.broken(patch)
            found = {each: hindrance(probe) for each, probe in PROBES.items()}
        assert found[name], f"the probe of {name} does not miss {thing}"
        for other, things in relied_on.items():
            if not any(thing.keys & each.keys for each in things):
                assert found[other] is None, f"{thing} is broken, and {other} says: {found[other]}"


def test_a_module_that_is_gone_is_a_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.worker.worker_base

    monkeypatch.delattr(vllm.v1.worker, "worker_base")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    assert (hindrance(steps.probe) or "").startswith("ModuleNotFoundError: ")


def test_what_a_probe_reads_in_the_code_itself_is_missed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ir
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.layers import utils

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        layer.other = remove_weight

    with monkeypatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch_cpu_unquantized_gemm)
        reason = HOOKS["linear"].hindrance()
        assert reason == "dispatch_cpu_unquantized_gemm does not set layer.cpu_linear"
    with monkeypatch.context() as patch:
        patch.setattr(ir.ops.rms_norm, "_py_signature", ir.ops.fused_add_rms_norm._py_signature)
        reason = HOOKS["rms_norm"].hindrance()
        assert reason is not None
        assert reason.startswith("vLLM's rms_norm takes x, x_residual, weight")
    with monkeypatch.context() as patch:
        patch.setattr(SpinCondition, "__init__", lambda self: None)
        reason = hindrance(spin.probe)
        assert reason == "SpinCondition.__init__ knows no is_reader and no busy_loop_s and no last_read"


@pytest.mark.usefixtures("vllm_is_put_back")
def test_a_slot_whose_hook_is_missing_is_off_and_told_once_and_the_others_are_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.model_executor.layers import utils

    native = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setenv("POLYMORPH_SLOTS", "linear,rms_norm")
    monkeypatch.delattr(IrOpPriorityConfig, "set_default")
    with caplog.at_level(logging.ERROR):
        made = Installation.make()
    assert made.slots is not None
    assert made.slots.missing == {"rms_norm": "IrOpPriorityConfig has no set_default"}
    assert [record.getMessage() for record in caplog.records] == [
        "the slot rms_norm is off, the engine runs its own code there: IrOpPriorityConfig has no set_default"
    ]
    assert utils.dispatch_cpu_unquantized_gemm is not native


@pytest.mark.usefixtures("vllm_is_put_back")
def test_a_slot_that_is_switched_off_by_name_leaves_vllm_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.model_executor.layers import utils

    linear, norms = utils.dispatch_cpu_unquantized_gemm, IrOpPriorityConfig.set_default
    monkeypatch.setenv("POLYMORPH_SLOTS", "linear,rms_norm")
    monkeypatch.setenv("POLYMORPH_DISABLE", "linear")
    made = Installation.make()
    assert made.slots is not None
    assert made.slots.missing == {"linear": "POLYMORPH_DISABLE names it"}
    assert utils.dispatch_cpu_unquantized_gemm is linear
    assert IrOpPriorityConfig.set_default is not norms


def test_stock_code_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def functions() -> list[Any]:
        return [
            utils.dispatch_cpu_unquantized_gemm,
            IrOpPriorityConfig.set_default,
            VllmConfig.compute_hash,
            SpinCondition.__init__,
            WorkerWrapperBase.execute_model,
        ]

    class Extension:
        def slots_describe(self) -> dict[str, Any]:
            raise AssertionError("the slots are off")

        def slots_read(self, reset: bool = False) -> dict[str, Any]:
            raise AssertionError("the slots are off")

    before = functions()
    monkeypatch.setenv("POLYMORPH_SLOTS", "linear,rms_norm")
    monkeypatch.setenv("POLYMORPH_DISABLE", "1")
    made = Installation.make()
    answering = made.answering(Extension)()
    assert functions() == before
    assert made.slots is None
    reason = "POLYMORPH_DISABLE is set: this engine runs stock code"
    assert answering.slots_read(reset=True)["ok"] is False
    assert answering.slots_describe() == {
        "ok": False,
        "reason": reason,
        "definitions": {},
        "engaged": [],
        "missing": {"linear": reason, "rms_norm": reason},
    }


@pytest.mark.usefixtures("vllm_is_put_back")
@pytest.mark.usefixtures("vllm_is_put_back")
@pytest.mark.parametrize("idle_s", [0.0, 1.2])
def test_a_message_whose_call_was_lost_is_found_soon_by_a_process_that_sleeps(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

    spin.shorten_spin()
    queue = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue.enqueue("called")
    assert reader.dequeue(timeout=60) == "called"
    monkeypatch.setattr(SpinCondition, "notify", lambda self: None)
    sleeping = threading.Thread(target=lambda: found.append(reader.dequeue(timeout=60)))
    found: list[str] = []
    sleeping.start()
    time.sleep(idle_s + 0.2)  # it spins no more
    began = time.monotonic()
    queue.enqueue("not called")
    sleeping.join()
    assert found == ["not called"]
    assert time.monotonic() - began < 2.0, "vLLM itself takes up to five seconds"


def test_a_graph_is_cached_under_the_slots_that_it_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "compute_hash", lambda self: "0123456789")
    graphs.mark("linear-1")
    first = VllmConfig.compute_hash(None)
    monkeypatch.setattr(VllmConfig, "compute_hash", lambda self: "0123456789")
    graphs.mark("linear,rms_norm-1")
    second = VllmConfig.compute_hash(None)
    assert len({"0123456789", first, second}) == 3
    assert len(first) == len(second) == 10


def test_vllms_own_application_names_the_revision_and_is_watched_over_while_it_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from starlette.testclient import TestClient
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    watched: list[Any] = []

    async def serve(settings: Any, llm: Any, args: Any) -> None:
        watched.append((settings.folder, llm, args.model))
        try:
            await asyncio.Event().wait()
        finally:
            watched.append("ended")

    monkeypatch.setattr(entry, "build_app", entry.build_app)
    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setenv("POLYMORPH_KERNELS", str(tmp_path))
    monkeypatch.setenv("POLYMORPH_FLIGHT_DIR", str(tmp_path / "flight"))
    front.install()
    command = ["--model", "m", "--worker-extension-cls", front.EXTENSION]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    model = SimpleNamespace(get_pooling_task=lambda tasks: None, is_encoder_decoder=False)
    app = entry.build_app(args, ("generate",), model)
    app.state.engine_client, app.state.args, app.state.log_stats = "engine", args, False
    with TestClient(app) as client:
        for path in ("/nowhere", "/collective_rpc"):  # vLLM's development mode is off
            answer = client.post(path)
            assert (answer.status_code, answer.headers["x-polymorph-revision"]) == (404, "empty")
    assert watched == [(tmp_path.resolve(), "engine", "m"), "ended"]
