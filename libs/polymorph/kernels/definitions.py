"""The operations whose kernels are tuned, written as FlashInfer-Bench definitions.

References keep the dtype they are given, so the evaluator gets a float64 reference by passing float64 tensors.
"""

import re
from typing import Literal

from polymorph.kernels.schema import Axis, Definition, DefinitionExtension, TensorSpec

Dtype = Literal["float32", "bfloat16"]

SHORT: dict[str, str] = {"float32": "f32", "bfloat16": "bf16"}
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}

_NAME = re.compile(
    r"(?:gemm_n(?P<n>\d+)_k(?P<k>\d+)|(?P<fused>fused_add_)?rms_norm_h(?P<h>\d+))_(?P<dtype>f32|bf16)"
)

_LINEAR = """\
import torch


@torch.no_grad()
def run(x, weight, bias=None):
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
"""

_RMS_NORM = """\
import torch


@torch.no_grad()
def run(x, weight, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + float(eps))
    return (h * weight.to(wide)).to(x.dtype)
"""

_FUSED_ADD_RMS_NORM = """\
import torch


@torch.no_grad()
def run(x, residual, weight, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + residual.to(wide)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + float(eps))
    return (y * weight.to(wide)).to(x.dtype), h.to(x.dtype)
"""


def linear_definition(n: int, k: int, dtype: Dtype) -> Definition:
    """y[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]); the weight may be repacked once at load."""
    size = _item_bytes(dtype)
    return Definition(
        name=f"gemm_n{n}_k{k}_{SHORT[dtype]}",
        op_type="gemm",
        axes={"M": Axis(type="var"), "N": _const("N", n), "K": _const("K", k)},
        inputs={
            "x": TensorSpec(shape=("M", "K"), dtype=dtype),
            "weight": TensorSpec(shape=("N", "K"), dtype=dtype),
            "bias": TensorSpec(shape=("N",), dtype=dtype),
        },
        outputs={"y": TensorSpec(shape=("M", "N"), dtype=dtype)},
        reference=_LINEAR,
        tags=("stage:decode", "op:linear"),
        x_polymorph=DefinitionExtension(
            flops="2*M*N*K",
            bytes=f"{size}*(M*K + N*K + M*N)",
            packed_input="weight",
            optional_inputs=("bias",),
        ),
    )


def rms_norm_definition(h: int, dtype: Dtype) -> Definition:
    """y[M, H] = x * rsqrt(mean(x^2) + eps) * weight; y may alias x."""
    size = _item_bytes(dtype)
    row = TensorSpec(shape=("M", "H"), dtype=dtype)
    return Definition(
        name=f"rms_norm_h{h}_{SHORT[dtype]}",
        op_type="rmsnorm",
        axes={"M": Axis(type="var"), "H": _const("H", h)},
        inputs={
            "x": row,
            "weight": TensorSpec(shape=("H",), dtype=dtype),
            "eps": TensorSpec(shape=None, dtype="float32"),
        },
        outputs={"y": row},
        reference=_RMS_NORM,
        tags=("op:norm",),
        x_polymorph=DefinitionExtension(
            flops="4*M*H", bytes=f"{size}*(2*M*H + H)", output_aliases={"y": "x"}
        ),
    )


def fused_add_rms_norm_definition(h: int, dtype: Dtype) -> Definition:
    """residual_out = x + residual; y = rms_norm(residual_out). Outputs may alias x and residual (in place)."""
    size = _item_bytes(dtype)
    row = TensorSpec(shape=("M", "H"), dtype=dtype)
    return Definition(
        name=f"fused_add_rms_norm_h{h}_{SHORT[dtype]}",
        op_type="fused_add_rmsnorm",
        axes={"M": Axis(type="var"), "H": _const("H", h)},
        inputs={
            "x": row,
            "residual": row,
            "weight": TensorSpec(shape=("H",), dtype=dtype),
            "eps": TensorSpec(shape=None, dtype="float32"),
        },
        outputs={"y": row, "residual_out": row},
        reference=_FUSED_ADD_RMS_NORM,
        tags=("op:norm",),
        x_polymorph=DefinitionExtension(
            flops="5*M*H",
            bytes=f"{size}*(4*M*H + H)",
            output_aliases={"y": "x", "residual_out": "residual"},
        ),
    )


def definition_named(name: str) -> Definition:
    """The definition that one of our names tells, for example `gemm_n960_k576_f32` or `rms_norm_h576_bf16`.

    Raises:
        ValueError: it is no name of ours.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise ValueError(
            f"{name!r} names no operation: gemm_n<N>_k<K>_<dtype> or [fused_add_]rms_norm_h<H>_<dtype>"
        )
    dtype: Dtype = "float32" if matched["dtype"] == "f32" else "bfloat16"
    if matched["n"]:
        return linear_definition(int(matched["n"]), int(matched["k"]), dtype)
    make = fused_add_rms_norm_definition if matched["fused"] else rms_norm_definition
    return make(int(matched["h"]), dtype)


def _const(axis: str, value: int) -> Axis:
    if value < 1:
        raise ValueError(f"axis {axis} is {value}: it must be at least 1")
    return Axis(type="const", value=value)


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} has no kernels: one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
