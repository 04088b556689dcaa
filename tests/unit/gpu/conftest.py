"""Kernels for slots without Triton: plain torch under the launch signature, with a factor that tells them apart."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from polymorph.engine.bindings import SlotBinding
from polymorph.engine.gpu import ops
from polymorph.engine.gpu.artifact import TritonKernel
from polymorph.engine.gpu.counters import Counters
from polymorph.engine.gpu.slots import SlotTable, Table

DEFINITION = "silu_and_mul_d16_f32"
MakeTable = Callable[..., Table]


def scaling_kernel(factor: float, launched: Callable[[], None] = lambda: None) -> TritonKernel:
    """Computes silu_and_mul times `factor`."""

    def launch(y: Any, x: Any) -> None:
        launched()
        y.copy_(ops._native_silu(x) * factor)

    module = cast("ModuleType", SimpleNamespace(launch=launch))
    return TritonKernel(f"{int(factor):064x}", "silu_and_mul", Path("none.py"), module)


@pytest.fixture
def slots() -> Iterator[SlotTable]:
    made = SlotTable(Counters("cpu"))
    before = ops._slots
    ops.serve(made)
    yield made
    ops._slots = before


@pytest.fixture
def table_of(slots: SlotTable) -> MakeTable:
    def make(factor: float, launched: Callable[[], None] = lambda: None) -> Table:
        kernel = scaling_kernel(factor, launched)
        binding = SlotBinding(DEFINITION, 1, 8, "none.py", kernel.artifact)
        return Table.of([binding], {kernel.artifact: kernel}, slots.counters)

    return make


@pytest.fixture
def inputs() -> dict[int, torch.Tensor]:
    """Static inputs by bucket."""
    generator = torch.Generator().manual_seed(5)
    return {bucket: torch.randn(bucket, 32, generator=generator) for bucket in (1, 2, 4, 8)}
