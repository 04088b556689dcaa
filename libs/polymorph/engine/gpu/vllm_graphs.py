"""Where a GPU worker of vLLM keeps captured graphs, for both of its model runners. Written against vLLM 0.32.

It follows vLLM's own recipe for elastic expert parallelism (`ElasticEPScalingExecutor.warm_and_capture`), without its
reset of compiled code: a slot is an opaque call there, so what is compiled stays right.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from polymorph.engine.gpu.hooks import vllm_module
from polymorph.engine.hooks.hook import HookMissing, expect

_MIB = 1 << 20
_REFUSED: dict[str, str] = {
    "encoder_cudagraph_manager": "graphs of a multimodal encoder",
    "adaptive_verification": "adaptive verification, which measures graphs when they are captured",
    "lora_config": "LoRA, whose graphs are captured with adapters of its own",
    "pcp_manager": "prefill context parallelism",
}


@dataclass(frozen=True)
class Place:
    """An attribute that holds graphs or names their pool, and what an empty one holds."""

    owner: Any
    attribute: str
    empty: Callable[[], Any]

    def swap(self, value: Any) -> Any:
        before = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, value)
        return before


class VllmGraphs:
    """The graphs of one worker. `set_mib` is what a set takes, until one has been captured and measured."""

    def __init__(self, worker: Any, *, set_mib: int = 2048, spare_mib: int = 512) -> None:
        self._worker = worker
        self._runner = worker.model_runner
        self._set_bytes = set_mib * _MIB
        self._spare = spare_mib * _MIB
        self._pool: Any = None

    def refusal(self) -> str | None:
        try:
            list(places(self._runner, lambda: None))
            self._capture_state()
        except HookMissing as error:
            return str(error)
        for attribute, what in _REFUSED.items():
            if getattr(self._runner, attribute, None):
                return f"kernels are not changed in an engine with {what}"
        if getattr(self._worker.vllm_config, "use_cumem_cudagraph_pool", False):
            return "kernels are not changed in an engine whose sleep mode owns the graphs' memory"
        if getattr(self._worker.vllm_config.parallel_config, "use_ubatching", False):
            return "kernels are not changed in an engine with microbatches"
        return None

    def fits(self) -> bool:
        return int(torch.cuda.mem_get_info()[0]) >= self._set_bytes + self._spare

    def take(self) -> list[tuple[Place, Any]]:
        # Never the old pool: once its last graph is gone, the allocator refuses its name.
        self._pool = torch.cuda.graph_pool_handle()
        return [(place, place.swap(place.empty())) for place in places(self._runner, lambda: self._pool)]

    def put(self, held: list[tuple[Place, Any]]) -> None:
        for place, value in reversed(held):
            place.swap(value)

    def capture(self) -> None:
        free = int(torch.cuda.mem_get_info()[0])
        with quiet_jit_monitor(), self._capture_state():
            self._runner.capture_model()
        taken = free - int(torch.cuda.mem_get_info()[0])
        self._set_bytes = max(taken, 0) or self._set_bytes

    def abort(self) -> None:
        allowed = vllm_module("vllm.compilation.monitor")
        allowed.set_cudagraph_capturing_enabled(False)
        # torch ends a capture that became invalid without telling its allocator.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)  # noqa: SLF001

    def settle(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def _capture_state(self) -> AbstractContextManager[Any]:
        """The first runner captures with the block tables that requests use: it saves them. The second has dummies."""
        if hasattr(self._runner, "cudagraph_manager"):
            return contextlib.nullcontext()
        preserve = getattr(self._runner, "preserve_serving_state", None)
        if preserve is None:
            raise HookMissing("vLLM's GPU model runner has no preserve_serving_state")
        saved: AbstractContextManager[Any] = preserve()
        return saved


def places(runner: Any, pool: Callable[[], Any]) -> Iterator[Place]:
    """Every place that holds graphs of this runner.

    Raises:
        HookMissing: one that is known is not there.
    """
    full, breakable = (
        vllm_module("vllm.compilation.cuda_graph"),
        vllm_module("vllm.compilation.breakable_cudagraph"),
    )
    for wrappers, attribute in (
        (expect(full, "CUDAGraphWrapper"), "concrete_cudagraph_entries"),
        (expect(breakable, "BreakableCUDAGraphWrapper"), "entries"),
    ):
        for wrapper in list(expect(wrappers, "_all_instances")):
            yield _place(wrapper, attribute, dict)
            yield _place(wrapper, "graph_pool", pool)
    yield _place(type(vllm_module("vllm.platforms").current_platform), "_global_graph_pool", pool)
    expect(runner, "capture_model")
    for manager in _managers(runner):
        yield _place(manager, "graphs", dict)
        yield _place(manager, "_graphs_captured", bool)
        yield _place(manager, "pool", pool)


def _managers(runner: Any) -> Iterator[Any]:
    """Those of the second model runner, and of its speculator."""
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None:
        return
    yield manager
    kind = expect(vllm_module("vllm.v1.worker.gpu.cudagraph_utils"), "CudaGraphManager")
    speculator = getattr(runner, "speculator", None)
    for value in vars(speculator).values() if speculator is not None else ():
        if isinstance(value, kind):
            yield value


def _place(owner: Any, attribute: str, empty: Callable[[], Any]) -> Place:
    expect(owner, attribute)
    return Place(owner, attribute, empty)


@contextlib.contextmanager
def quiet_jit_monitor() -> Iterator[None]:
    """An engine may be told to raise when a kernel is compiled after its start; ours are, before they are engaged."""
    monitor = vllm_module("vllm.utils.jit_monitor")
    place = Place(monitor, "_mode", str)
    before = place.swap("warn")
    try:
        yield
    finally:
        place.swap(before)
