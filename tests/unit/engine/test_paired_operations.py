"""The paired benchmark of operations: what it times is what it says, and a wrong kernel is never timed."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from benchmarks.operations.paired import Case, WrongKernel, close, compared

from polymorph.engine.dispatcher.ops import load
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.kernels.build import build
from polymorph.kernels.catalogue.artifacts import Artifact
from polymorph.kernels.schema import Solution, SourceFile
from polymorph.kernels.toolchain import detect_toolchain, run_command

TORCH = 2
_SCALES = """
#include "polymorph_kernel.h"
extern "C" int32_t pm_run(const pm_context *, const pm_tensor *in, int32_t, const pm_tensor *out, int32_t) {
  const float *x = static_cast<const float *>(in[0].data), *w = static_cast<const float *>(in[1].data);
  float *y = static_cast<float *>(out[0].data);
  for (int64_t i = 0; i < in[0].sizes[0]; i++) y[i] = x[i] * w[0] + %s;
  return %s;
}
"""


def _artifact(folder: Path, definition: str, added: str, status: str = "0") -> Artifact:
    source = SourceFile(path="kernel.cpp", content=_SCALES % (added, status))
    solution = Solution(
        name=f"{definition}-{added}", definition=definition, author="test", spec={}, sources=(source,)
    )
    built = build(solution, folder / f"{added}{status}", detect_toolchain(), run_command)
    return Artifact(solution, built.path, built.digest, None)


@pytest.fixture
def case() -> Any:
    """A linear layer from one number to one number."""
    slots = Slots(ops=load(), weights=WeightStore(1 << 20), packed=PackedWeights(1 << 20))
    weight, x = torch.full((1, 1), 2.0), torch.randn(3, 1)
    layer = slots.add_linear(weight, TORCH, weight, held_by_model=True)
    calls = [lambda: slots.ops.linear(x, None, layer, 1)] * 2
    return slots, Case("linear", "none", 3, "gemm_n1_k1_f32", calls)


def test_the_best_right_kernel_is_confirmed(case: Any, tmp_path: Path) -> None:
    slots, described = case
    right = _artifact(tmp_path, described.definition, "0")
    described = replace(described, without_slot=described.calls)
    found = compared(slots, described, [right], 1, Random(0))
    assert found.kernel == "0"
    assert found.lowest <= found.ratio
    row = found.row()
    assert row["m"] == 3
    assert row["without_slot_us"] > 0
    assert row["undisturbed"] > 0
    assert slots.engaged == []


def test_a_wrong_kernel_is_never_timed(case: Any, tmp_path: Path) -> None:
    slots, described = case
    with pytest.raises(WrongKernel, match="other results"):
        compared(slots, described, [_artifact(tmp_path, described.definition, "1")], 1, Random(0))
    with pytest.raises(WrongKernel, match="did not serve"):
        compared(slots, described, [_artifact(tmp_path, described.definition, "0", "7")], 1, Random(0))


def test_outputs_are_compared_by_kind() -> None:
    one = torch.randn(8)
    assert close((one, None), (one * (1 + 1e-6), None))
    assert not close((one,), (one * 1.01,))
    assert close(torch.tensor([3]), torch.tensor([3]))
    assert not close(torch.tensor([3]), torch.tensor([4]))
    assert not close(one, None)
