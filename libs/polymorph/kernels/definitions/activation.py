"""The gated activation between a layer's two linear layers: y = silu(gate) * up."""

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

_SILU_AND_MUL = """\
import torch


@torch.no_grad()
def run(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(wide).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
"""


def silu_and_mul_definition(d: int, dtype: Dtype) -> Definition:
    """y[M, D] = silu(x[:, :D]) * x[:, D:] of x[M, W], where W is 2 D."""
    size = item_bytes(dtype)
    return Definition(
        name=f"silu_and_mul_d{d}_{SHORT[dtype]}",
        op_type="silu_and_mul",
        axes={"M": Axis(type="var"), "D": const("D", d), "W": const("W", 2 * d)},
        inputs={"x": TensorSpec(shape=("M", "W"), dtype=dtype)},
        outputs={"y": TensorSpec(shape=("M", "D"), dtype=dtype)},
        reference=_SILU_AND_MUL,
        tags=("op:activation",),
        constraints=("W == 2 * D",),
        x_polymorph=DefinitionExtension(flops="5*M*D", bytes=f"{size}*3*M*D"),
    )


SILU_AND_MUL = Family(
    pattern=re.compile(rf"silu_and_mul_d(?P<d>\d+)_{DTYPE_PATTERN}"),
    shown="silu_and_mul_d<D>_<dtype>",
    slot="silu_and_mul",
    make=lambda match: silu_and_mul_definition(int(match["d"]), dtype_of(match)),
)
