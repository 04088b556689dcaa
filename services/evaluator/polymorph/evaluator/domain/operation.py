"""Operations that can be evaluated: their shapes by name, and float64 references with a scale for their errors."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polymorph.evaluator.domain.number import unit_roundoff
from polymorph.kernels.definitions import (
    Dtype,
    fused_add_rms_norm_definition,
    linear_definition,
    rms_norm_definition,
)
from polymorph.kernels.schema import Definition

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]
Kind = Literal["gemm", "rmsnorm", "fused_add_rmsnorm"]

_NAME = re.compile(r"(?:(gemm)_n(\d+)_k(\d+)|(rms_norm|fused_add_rms_norm)_h(\d+))_(f32|bf16)")
_DTYPES: dict[str, Dtype] = {"f32": "float32", "bf16": "bfloat16"}


class UnknownOperation(ValueError):
    """A definition that this evaluator has no reference for."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A definition with its constants; `columns` is the width of its outputs, `depth` the length of its sums."""

    definition: Definition
    kind: Kind
    dtype: Dtype
    columns: int
    depth: int

    @property
    def packs(self) -> bool:
        return self.definition.x_polymorph.packed_inputs != ()

    def flops(self, m: int) -> float:
        return float(2 * m * self.columns * self.depth) if self.kind == "gemm" else float(5 * m * self.depth)

    def weight_shape(self) -> tuple[int, ...]:
        return (self.columns, self.depth) if self.kind == "gemm" else (self.depth,)


@dataclass(frozen=True, slots=True)
class Expected:
    """A reference output for some columns, and how large an error of one unit is in each place."""

    columns: npt.NDArray[np.int64]
    value: Wide
    unit: Wide


def operation(name: str) -> Operation:
    """The operation that a definition's name tells.

    Raises:
        UnknownOperation: no operation of ours has such a name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UnknownOperation(
            f"definition {name!r} is none of gemm_n*_k*, rms_norm_h* and fused_add_rms_norm_h*"
        )
    dtype = _DTYPES[found[6]]
    if found[1]:
        n, k = int(found[2]), int(found[3])
        return Operation(linear_definition(n, k, dtype), "gemm", dtype, n, k)
    h = int(found[5])
    if found[4] == "rms_norm":
        return Operation(rms_norm_definition(h, dtype), "rmsnorm", dtype, h, h)
    return Operation(fused_add_rms_norm_definition(h, dtype), "fused_add_rmsnorm", dtype, h, h)


def expected(op: Operation, inputs: dict[str, Array], columns: npt.NDArray[np.int64]) -> dict[str, Expected]:
    """float64 references of the outputs in `columns`, from the values that the kernel got.

    The unit of error is what rounding the output once, and the terms of the sum once each, may cost: a relative error
    alone would forgive nothing where terms cancel, an absolute one everything where outputs are small.
    """
    wide = {name: value.astype(np.float64) for name, value in inputs.items() if name != "weight"}
    out, accumulate = unit_roundoff(op.dtype), unit_roundoff("float32")
    if op.kind == "gemm":
        weight = inputs["weight"][columns].astype(np.float64)
        value = wide["x"] @ weight.T
        unit = np.abs(wide["x"]) @ np.abs(weight).T * accumulate
        if "bias" in wide:
            value = value + wide["bias"][columns]
            unit = unit + np.abs(wide["bias"][columns]) * accumulate
        return {"y": Expected(columns, value, unit + out * np.abs(value))}
    weight = inputs["weight"].astype(np.float64)
    summed = wide["x"] + wide["residual"] if op.kind == "fused_add_rmsnorm" else wide["x"]
    scale = 1.0 / np.sqrt(np.mean(summed * summed, axis=1, keepdims=True) + float(wide["eps"]))
    value = (summed * scale * weight)[:, columns]
    found = {"y": Expected(columns, value, (out + 4 * accumulate) * np.abs(value))}
    if op.kind == "fused_add_rmsnorm":
        part = summed[:, columns]
        found["residual_out"] = Expected(columns, part, out * np.abs(part))
    return found
