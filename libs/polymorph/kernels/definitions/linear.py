"""Linear layers: y = x @ weight.T (+ bias)."""

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


def linear_definition(n: int, k: int, dtype: Dtype) -> Definition:
    """y[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]); the weight may be repacked once at load."""
    size = item_bytes(dtype)
    return Definition(
        name=f"gemm_n{n}_k{k}_{SHORT[dtype]}",
        op_type="gemm",
        axes={"M": Axis(type="var"), "N": const("N", n), "K": const("K", k)},
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
            packed_inputs=("weight",),
            optional_inputs=("bias",),
        ),
    )


LINEAR = Family(
    pattern=re.compile(rf"gemm_n(?P<n>\d+)_k(?P<k>\d+)_{DTYPE_PATTERN}"),
    shown="gemm_n<N>_k<K>_<dtype>",
    slot="linear",
    make=lambda match: linear_definition(int(match["n"]), int(match["k"]), dtype_of(match)),
)
