"""vLLM's worker extension on a GPU: `--worker-extension-cls polymorph.engine.gpu.extension.GpuExtension`.

Imported in the engine's process before the model loads, it installs the slots that POLYMORPH_GPU_SLOTS names. What is
compiled depends on them, so vLLM's compile cache must be told: `--additional-config '{"polymorph": "rms_norm"}'`, say.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polymorph.engine.bindings import BindingRefused, SlotBinding
from polymorph.engine.gpu import hooks, selftest
from polymorph.engine.gpu.artifact import TritonKernel, TritonMissing, load
from polymorph.engine.gpu.captured import CaptureFailed
from polymorph.engine.gpu.counters import Counters, CountersFull
from polymorph.engine.gpu.recapture import RecaptureRefused, recapture
from polymorph.engine.gpu.slots import SlotTable, Table
from polymorph.engine.gpu.source import SourceRefused, operation_of, sizes_of
from polymorph.engine.gpu.vllm_graphs import VllmGraphs, quiet_jit_monitor

SLOTS_VARIABLE = "POLYMORPH_GPU_SLOTS"
_REFUSALS = (
    BindingRefused, SourceRefused, TritonMissing, CountersFull, RecaptureRefused, CaptureFailed,
    selftest.SelfTestFailed, OSError,
)  # fmt: skip
Documents = Sequence[Mapping[str, Any]]


class Engaging:
    """The slots of one worker process: loads kernels, tries them, and captures the graphs anew."""

    def __init__(self, counters: Counters) -> None:
        self.slots = SlotTable(counters)
        self._kernels: dict[str, TritonKernel] = {}
        self._tried: set[tuple[str, str, int, int]] = set()
        self._graphs: VllmGraphs | None = None

    def prepare(self, documents: Documents) -> Table:
        """Loads, tries in another process and then compiles here what is new. Nothing changes for the model."""
        bindings = [SlotBinding.of(document) for document in documents]
        for binding in bindings:
            key = (binding.artifact, binding.definition, binding.min_m, binding.max_m)
            if key not in self._tried:
                self._try(binding)
                self._tried.add(key)
        return Table.of(bindings, self._kernels, self.slots.counters)

    def engage(self, documents: Documents, worker: Any) -> dict[str, Any]:
        """Captures all graphs with these kernels."""
        self._graphs = self._graphs or VllmGraphs(worker)
        table = self.prepare(documents)
        done = recapture(self._graphs, self.slots, table)
        used = {binding.artifact for binding in table.bindings}
        self._kernels = {artifact: kernel for artifact, kernel in self._kernels.items() if artifact in used}
        self._tried = {key for key in self._tried if key[0] in used}
        return {
            "way": done.way,
            "seconds": done.seconds,
            "inverse": [vars(each) for each in done.inverse.bindings],
        }

    def _try(self, binding: SlotBinding) -> None:
        operation = operation_of(binding.definition)
        sizes, dtype = sizes_of(binding.definition)
        case = selftest.Case(binding.path, operation, sizes, dtype, binding.max_m, binding.min_m)
        kernel = self._kernels.get(binding.artifact) or load(Path(binding.path), operation)
        selftest.in_process(case)
        with quiet_jit_monitor():
            selftest.check(kernel, case)
        self._kernels[kernel.artifact] = kernel


_ENGAGING: Engaging | None = None


def _install() -> Engaging:
    engaging = Engaging(Counters("cuda", torch.cuda.is_current_stream_capturing))
    wanted = [name for name in os.environ.get(SLOTS_VARIABLE, "").split(",") if name]
    hooks.install(wanted, engaging.slots)
    return engaging


if torch.cuda.is_available():
    _ENGAGING = _install()


class GpuExtension:
    """Calls for `collective_rpc`. A refusal is an answer ({"ok": False, "reason": ...}), as on the CPU."""

    def gpu_prepare(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes kernels ready while the engine serves."""
        return _answered(lambda engaging: {"buckets": len(engaging.prepare(documents).rows)})

    def gpu_engage(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes them the whole new table; the engine is paused. Graphs are captured anew, which takes seconds."""
        return _answered(lambda engaging: engaging.engage(documents, self))

    def gpu_read(self) -> dict[str, Any]:
        """Calls by definition, bucket and artifact, also from within captured graphs."""
        return _answered(
            lambda engaging: {
                "served": [
                    {**vars(cell), "calls": calls} for cell, calls in engaging.slots.counters.read().items()
                ],
                "engaged": [vars(binding) for binding in engaging.slots.engaged.bindings],
            }
        )


def _answered(call: Any) -> dict[str, Any]:
    if _ENGAGING is None:
        return {"ok": False, "reason": "no CUDA device was there when the engine started"}
    try:
        answer: dict[str, Any] = call(_ENGAGING)
    except _REFUSALS as error:
        return {"ok": False, "reason": str(error).splitlines()[0]}
    return {"ok": True, "reason": "", **answer}
