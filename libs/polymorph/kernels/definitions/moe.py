"""The experts of a mixture-of-experts layer: for each token the sum of its experts' outputs by the router's weights."""

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

BUSIEST = "percent of the tokens that the busiest expert serves"
"""Beside M it decides what is fast (the run-time histogram of experts, as in RaMP, arXiv 2604.26039): it gives the rows
of the largest product, so whether an expert's weights are read for one row (narrow storage pays) or for many (blocks of
rows pay). The number of distinct experts would not do: with more than a few tokens nearly every expert has one, however
skewed the rest is. Percent of tokens, not of token-expert pairs, since a token takes an expert once at most: it reaches
100 whatever the number of experts of a token is.
"""

_MOE = """\
import torch


@torch.no_grad()
def run(x, w13, w2, topk_weights, topk_ids):
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    for expert in topk_ids.unique().long().tolist():
        token, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = (x[token].to(wide) @ w13[expert].to(wide).T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].to(wide).T
        y.index_add_(0, token, out * topk_weights[token, place, None].to(wide))
    return y.to(x.dtype)
"""


def moe_definition(experts: int, topk: int, hidden: int, intermediate: int, dtype: Dtype) -> Definition:
    """y[M, H] from x[M, H], w13[E, 2 I, H] (gate above up), w2[E, H, I] and each token's K experts with their weights.

    `bytes` counts the weights of K experts: no call with a token reads fewer, and one whose tokens all go to the same
    experts reads no more. With D distinct experts a call reads D / K times as many.
    """
    size = item_bytes(dtype)
    if topk > experts:
        raise ValueError(f"axis K is {topk}: a token has at most the {experts} experts that there are")
    row = TensorSpec(shape=("M", "H"), dtype=dtype)
    return Definition(
        name=f"moe_e{experts}_k{topk}_h{hidden}_i{intermediate}_{SHORT[dtype]}",
        op_type="moe",
        axes={
            "M": Axis(type="var"),
            "E": const("E", experts),
            "K": const("K", topk),
            "H": const("H", hidden),
            "I": const("I", intermediate),
            "G": const("G", 2 * intermediate),
        },
        inputs={
            "x": row,
            "w13": TensorSpec(shape=("E", "G", "H"), dtype=dtype),
            "w2": TensorSpec(shape=("E", "H", "I"), dtype=dtype),
            "topk_weights": TensorSpec(shape=("M", "K"), dtype="float32"),
            "topk_ids": TensorSpec(shape=("M", "K"), dtype="int32"),
        },
        outputs={"y": row},
        reference=_MOE,
        tags=("op:moe", "activation:silu"),
        constraints=("0 <= topk_ids < E", "G == 2 * I"),
        x_polymorph=DefinitionExtension(
            flops="6*M*K*H*I",
            bytes=f"{size}*(2*M*H + 3*K*H*I) + 8*M*K",
            packed_inputs=("w13", "w2"),
            feature=BUSIEST,
        ),
    )


MOE = Family(
    pattern=re.compile(rf"moe_e(?P<e>\d+)_k(?P<k>\d+)_h(?P<h>\d+)_i(?P<i>\d+)_{DTYPE_PATTERN}"),
    shown="moe_e<E>_k<topk>_h<H>_i<I>_<dtype>",
    slot="moe",
    make=lambda match: moe_definition(
        int(match["e"]), int(match["k"]), int(match["h"]), int(match["i"]), dtype_of(match)
    ),
)
