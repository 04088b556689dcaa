"""The operations whose kernels are tuned, written as FlashInfer-Bench definitions.

References keep the dtype they are given, so the evaluator gets a float64 reference by passing float64 tensors.
"""

import re

from polymorph.kernels.definitions.activation import SILU_AND_MUL, silu_and_mul_definition
from polymorph.kernels.definitions.attention import ATTN_DECODE, attn_decode_definition
from polymorph.kernels.definitions.family import ITEM_BYTES, SHORT, Dtype, Family
from polymorph.kernels.definitions.linear import LINEAR, linear_definition
from polymorph.kernels.definitions.moe import MOE, moe_definition
from polymorph.kernels.definitions.norms import (
    FUSED_ADD_RMS_NORM,
    RMS_NORM,
    fused_add_rms_norm_definition,
    rms_norm_definition,
)
from polymorph.kernels.definitions.rotary import (
    QK_NORM_ROTARY,
    ROTARY,
    Heads,
    qk_norm_rotary_definition,
    rotary_definition,
)
from polymorph.kernels.definitions.sampling import TOP_K_TOP_P, top_k_top_p_definition
from polymorph.kernels.schema import Definition

__all__ = [
    "FAMILIES",
    "ITEM_BYTES",
    "SHORT",
    "SLOTS",
    "Dtype",
    "Heads",
    "attn_decode_definition",
    "definition_named",
    "fused_add_rms_norm_definition",
    "linear_definition",
    "moe_definition",
    "qk_norm_rotary_definition",
    "rms_norm_definition",
    "rotary_definition",
    "silu_and_mul_definition",
    "slot_of",
    "top_k_top_p_definition",
]

FAMILIES: tuple[Family, ...] = (
    LINEAR,
    RMS_NORM,
    FUSED_ADD_RMS_NORM,
    SILU_AND_MUL,
    ROTARY,
    QK_NORM_ROTARY,
    MOE,
    ATTN_DECODE,
    TOP_K_TOP_P,
)
SLOTS = tuple(dict.fromkeys(family.slot for family in FAMILIES))


def definition_named(name: str) -> Definition:
    """The definition that one of our names tells, for example `gemm_n960_k576_f32` or `rms_norm_h576_bf16`.

    Raises:
        ValueError: it is no name of ours.
    """
    family, match = _found(name)
    return family.make(match)


def slot_of(name: str) -> str:
    """The slot that calls of the definition with this name go through.

    Raises:
        ValueError: it is no name of ours.
    """
    return _found(name)[0].slot


def _found(name: str) -> tuple[Family, re.Match[str]]:
    for family in FAMILIES:
        match = family.pattern.fullmatch(name)
        if match is not None:
            return family, match
    raise ValueError(f"{name!r} names no operation: {', '.join(family.shown for family in FAMILIES)} do")
