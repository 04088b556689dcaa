"""Root-mean-square norms, plain and fused with the addition of the residual."""

import re

from polymorph.kernels.definitions.family import (
    DTYPE_PATTERN,
    SHORT,
    Dtype,
    Family,
    const,
    dtype_of,
    item_bytes,
)
from polymorph.kernels.schema import Axis, Definition, DefinitionExtension, TensorSpec

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


def rms_norm_definition(h: int, dtype: Dtype) -> Definition:
    """y[M, H] = x * rsqrt(mean(x^2) + eps) * weight; y may alias x."""
    size = item_bytes(dtype)
    row = TensorSpec(shape=("M", "H"), dtype=dtype)
    return Definition(
        name=f"rms_norm_h{h}_{SHORT[dtype]}",
        op_type="rmsnorm",
        axes={"M": Axis(type="var"), "H": const("H", h)},
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
    size = item_bytes(dtype)
    row = TensorSpec(shape=("M", "H"), dtype=dtype)
    return Definition(
        name=f"fused_add_rms_norm_h{h}_{SHORT[dtype]}",
        op_type="fused_add_rmsnorm",
        axes={"M": Axis(type="var"), "H": const("H", h)},
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


RMS_NORM = Family(
    pattern=re.compile(rf"rms_norm_h(?P<h>\d+)_{DTYPE_PATTERN}"),
    shown="rms_norm_h<H>_<dtype>",
    slot="rms_norm",
    make=lambda match: rms_norm_definition(int(match["h"]), dtype_of(match)),
)
FUSED_ADD_RMS_NORM = Family(
    pattern=re.compile(rf"fused_add_rms_norm_h(?P<h>\d+)_{DTYPE_PATTERN}"),
    shown="fused_add_rms_norm_h<H>_<dtype>",
    slot="rms_norm",
    make=lambda match: fused_add_rms_norm_definition(int(match["h"]), dtype_of(match)),
)
