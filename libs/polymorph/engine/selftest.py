"""`python -m polymorph.engine.selftest`: one kernel against the native computation on captured inputs.

Runs in a process of its own, under limits, before the kernel comes near an engine: a crash here is a refusal there.
Reads a `SelfTest` in JSON on standard input and writes a `SelfTestResult`.
"""

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from polymorph.engine.selftest_case import SelfTest, SelfTestResult
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.load import Buffer, DtypeCode, Kernel, Tensor
from polymorph.kernels.schema import Definition

CPU_LIMIT_S = 120
# By class of numerics: how many times the native error (root mean square against float64) a kernel may have.
_MARGIN = {"bitwise": 1.0, "reordered": 4.0, "lossy": 2e4}
_CODES = {torch.float32: DtypeCode.float32, torch.bfloat16: DtypeCode.bfloat16}


def run(test: SelfTest) -> SelfTestResult:
    """Every number of rows, each with the captured values."""
    definition = definition_named(test.definition)
    inputs = _inputs(test)
    kernel = Kernel(Path(test.library))
    worst = SelfTestResult(ok=True, reason="")
    with KernelHost.build().context(test.threads) as context:
        for rows in test.rows:
            result = _try(definition, kernel, context, _cut(definition, inputs, rows), test.numerics)
            if not result.ok:
                return SelfTestResult(
                    ok=False,
                    reason=f"{test.definition} at M = {rows}: {result.reason}",
                    error=result.error,
                    native_error=result.native_error,
                )
            worst = max(worst, result, key=lambda each: each.error)
    return worst


def _inputs(test: SelfTest) -> dict[str, Any]:
    calls = [load_file(path) for path in test.calls]
    joined = {
        name: torch.cat([call[name] for call in calls]) if name != "weight" else tensor
        for name, tensor in calls[0].items()
    }
    if test.weight is not None:
        joined |= load_file(test.weight)
    return joined


def _cut(definition: Definition, inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            cut[name] = inputs[name][:1].contiguous()
        elif name in inputs:
            tensor = inputs[name]
            if spec.shape[0] == "M":
                tensor = tensor.repeat(-(-rows // tensor.shape[0]), 1)[:rows].contiguous()
            cut[name] = tensor
        else:
            cut[name] = None
    return cut


def _try(
    definition: Definition, kernel: Kernel, context: int, inputs: dict[str, Any], numerics: str
) -> SelfTestResult:
    native = _reference(definition, inputs, None)
    exact = _reference(definition, inputs, torch.float64)
    outputs = [torch.full_like(each, float("nan")) for each in native]
    status = _call(definition, kernel, context, inputs, outputs)
    if status != 0:
        return SelfTestResult(ok=False, reason=f"the kernel answers {status}")
    error = max(_error(mine, truth) for mine, truth in zip(outputs, exact, strict=True))
    native_error = max(_error(theirs, truth) for theirs, truth in zip(native, exact, strict=True))
    # A sum of one order may by luck be exact: never ask for less than one rounding of the output's dtype.
    bound = _MARGIN[numerics] * max(native_error, torch.finfo(outputs[0].dtype).eps)
    if not error <= bound:
        return SelfTestResult(
            ok=False,
            reason=f"error {error:.3g} against float64; {bound:.3g} is allowed for {numerics} numerics",
            error=error,
            native_error=native_error,
        )
    return SelfTestResult(ok=True, reason="", error=error, native_error=native_error)


def _reference(definition: Definition, inputs: dict[str, Any], dtype: Any) -> list[Any]:
    # The reference is our own text, from the definitions of this very installation: no candidate can write it.
    space: dict[str, Any] = {}
    exec(compile(definition.reference, definition.name, "exec"), space)  # noqa: S102
    cast = {
        name: tensor if tensor is None or dtype is None else tensor.to(dtype)
        for name, tensor in inputs.items()
    }
    result = space["run"](**cast)
    return list(result) if isinstance(result, tuple) else [result]


def _call(
    definition: Definition, kernel: Kernel, context: int, inputs: dict[str, Any], outputs: list[Any]
) -> int:
    views = []
    kept: list[Buffer] = []
    for name, tensor in inputs.items():
        if tensor is None:
            views.append(Tensor.absent())
        elif kernel.packs and name in definition.x_polymorph.packed_inputs:
            size = kernel.pack_bytes(_view(tensor))
            if size < 1:
                return -1
            kept.append(Buffer(size))
            status = kernel.pack(context, _view(tensor), kept[-1].address)
            if status != 0:
                return status
            views.append(Tensor.packed(kept[-1].address, size))
        else:
            views.append(_view(tensor))
    return kernel.run(context, views, [_view(each) for each in outputs])


def _view(tensor: Any) -> Tensor:
    return Tensor.at(tensor.data_ptr(), tuple(tensor.shape), _CODES[tensor.dtype])


def _error(output: Any, truth: Any) -> float:
    difference = output.to(torch.float64) - truth
    scale = truth.square().mean().sqrt().clamp_min(1e-30)
    return float(difference.square().mean().sqrt() / scale)


def main() -> int:
    os.nice(10)  # the engine next to us serves users
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    document = json.load(sys.stdin)
    test = SelfTest(**{**document, "calls": tuple(document["calls"]), "rows": tuple(document["rows"])})
    sys.stdout.write(json.dumps(asdict(run(test))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
