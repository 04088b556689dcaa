"""Rotary position embedding of query and key, alone and after a norm of each head."""

import re
from dataclasses import dataclass
from string import Template
from typing import Literal

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

Style = Literal["neox", "gptj"]

# The styles differ in which two values of a head are turned together: those half a rotation apart, or neighbours.
_ROTATE = Template("""\
import torch

HEAD, ROTARY, NEOX = $head, $rotary, $neox


def rotated(x, cos, sin):
    turned, passed = x[..., :ROTARY], x[..., ROTARY:]
    a, b = turned.chunk(2, dim=-1) if NEOX else (turned[..., ::2], turned[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(pair, dim=-1) if NEOX else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((turned, passed), dim=-1)

""")

_ROTARY = """
@torch.no_grad()
def run(positions, query, key, cos_sin_cache):
    wide = torch.promote_types(query.dtype, torch.float32)
    cos, sin = cos_sin_cache.to(wide)[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turn(x):
        return rotated(x.to(wide).unflatten(-1, (-1, HEAD)), cos, sin).flatten(1).to(x.dtype)

    return turn(query), turn(key)
"""

_QK_NORM_ROTARY = """
@torch.no_grad()
def run(positions, query, key, cos_sin_cache, query_weight, key_weight, eps):
    wide = torch.promote_types(query.dtype, torch.float32)
    cos, sin = cos_sin_cache.to(wide)[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turn(x, weight):
        heads = x.to(wide).unflatten(-1, (-1, HEAD))
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + float(eps)) * weight.to(wide)
        return rotated(heads, cos, sin).flatten(1).to(x.dtype)

    return turn(query, query_weight), turn(key, key_weight)
"""


@dataclass(frozen=True)
class Heads:
    """The shape of query and key: how many heads each, their width, how much of it is turned, and in which pairs."""

    query: int
    key: int
    width: int
    rotary: int
    style: Style = "neox"

    @property
    def name(self) -> str:
        return f"q{self.query}_k{self.key}_d{self.width}_r{self.rotary}_{self.style}"


def rotary_definition(heads: Heads, dtype: Dtype) -> Definition:
    """Turns the first R values of each head of query[M, Q] and key[M, K] by the row of cos_sin_cache[P, R] (cosines, then
    sines) that its position names; outputs may alias query and key.
    """
    return _definition(heads, dtype, norm=False)


def qk_norm_rotary_definition(heads: Heads, dtype: Dtype) -> Definition:
    """Each head normalised by its root mean square and scaled by a weight, then turned as in `rotary_definition`."""
    return _definition(heads, dtype, norm=True)


def _definition(heads: Heads, dtype: Dtype, *, norm: bool) -> Definition:
    size = item_bytes(dtype)
    if heads.rotary % 2 or heads.rotary > heads.width:
        raise ValueError(
            f"{heads.rotary} values of a head of {heads.width} are turned: an even number up to its width"
        )
    inputs = {
        "positions": TensorSpec(shape=("M",), dtype="int64"),
        "query": TensorSpec(shape=("M", "Q"), dtype=dtype),
        "key": TensorSpec(shape=("M", "K"), dtype=dtype),
        "cos_sin_cache": TensorSpec(shape=("P", "R"), dtype=dtype),
    }
    if norm:
        weight = TensorSpec(shape=("D",), dtype=dtype)
        inputs |= {
            "query_weight": weight,
            "key_weight": weight,
            "eps": TensorSpec(shape=None, dtype="float32"),
        }
    axes = {"M": Axis(type="var"), "P": Axis(type="var")} | {
        "Q": const("Q", heads.query * heads.width),
        "K": const("K", heads.key * heads.width),
        "D": const("D", heads.width),
        "R": const("R", heads.rotary),
    }
    rotate = _ROTATE.substitute(head=heads.width, rotary=heads.rotary, neox=heads.style == "neox")
    kind = "qk_norm_rotary" if norm else "rotary"
    return Definition(
        name=f"{kind}_{heads.name}_{SHORT[dtype]}",
        op_type=kind,
        axes=axes,
        inputs=inputs,
        outputs={
            "query_out": TensorSpec(shape=("M", "Q"), dtype=dtype),
            "key_out": TensorSpec(shape=("M", "K"), dtype=dtype),
        },
        reference=rotate + (_QK_NORM_ROTARY if norm else _ROTARY),
        tags=("op:rotary", f"style:{heads.style}"),
        constraints=("0 <= positions < P",),
        x_polymorph=DefinitionExtension(
            flops=f"3*M*(Q+K)*R//D + {4 if norm else 0}*M*(Q+K)",
            bytes=f"{size}*M*(2*Q + 2*K + R) + 8*M",
            output_aliases={"query_out": "query", "key_out": "key"},
        ),
    )


def _family(kind: str, *, norm: bool) -> Family:
    def make(match: re.Match[str]) -> Definition:
        query, key, width, rotary = (int(match[axis]) for axis in ("q", "k", "d", "r"))
        heads = Heads(query, key, width, rotary, "neox" if match["style"] == "neox" else "gptj")
        return _definition(heads, dtype_of(match), norm=norm)

    return Family(
        pattern=re.compile(
            rf"{kind}_q(?P<q>\d+)_k(?P<k>\d+)_d(?P<d>\d+)_r(?P<r>\d+)_(?P<style>neox|gptj)_{DTYPE_PATTERN}"
        ),
        shown=f"{kind}_q<heads>_k<heads>_d<width>_r<turned>_<neox|gptj>_<dtype>",
        slot="rotary",
        make=make,
    )


ROTARY = _family("rotary", norm=False)
QK_NORM_ROTARY = _family("qk_norm_rotary", norm=True)
