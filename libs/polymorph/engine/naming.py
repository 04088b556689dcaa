"""From a slot's name to the definition that it names."""

import re

from polymorph.kernels.definitions import (
    SHORT,
    Dtype,
    fused_add_rms_norm_definition,
    linear_definition,
    rms_norm_definition,
)
from polymorph.kernels.schema import Definition

_LINEAR = re.compile(r"gemm_n(\d+)_k(\d+)_([a-z0-9]+)")
_NORM = re.compile(r"(fused_add_)?rms_norm_h(\d+)_([a-z0-9]+)")


def definition_named(name: str) -> Definition:
    """The definition behind a slot's name.

    Raises:
        ValueError: no slot has such a name.
    """
    linear = _LINEAR.fullmatch(name)
    if linear is not None:
        return linear_definition(int(linear[1]), int(linear[2]), _dtype(linear[3]))
    norm = _NORM.fullmatch(name)
    if norm is not None:
        make = fused_add_rms_norm_definition if norm[1] else rms_norm_definition
        return make(int(norm[2]), _dtype(norm[3]))
    raise ValueError(
        f"{name!r} names no slot: gemm_n<N>_k<K>_<dtype>, rms_norm_h<H>_<dtype> and its fused form do"
    )


def _dtype(short: str) -> Dtype:
    for dtype, text in SHORT.items():
        if text == short:
            return "float32" if dtype == "float32" else "bfloat16"
    raise ValueError(f"{short!r} is no dtype of a slot: one of {', '.join(SHORT.values())}")
