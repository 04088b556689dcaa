"""What all families of operations share: dtypes, constant axes, and how a name tells its definition."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from polymorph.kernels.schema import Axis, Definition

Dtype = Literal["float32", "bfloat16"]

SHORT: dict[str, str] = {"float32": "f32", "bfloat16": "bf16"}
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
DTYPE_PATTERN = r"(?P<dtype>f32|bf16)"


@dataclass(frozen=True)
class Family:
    """Operations that differ in their constant axes alone.

    `shown` is the form of their names, for people; `slot` the slot that they are called through.
    """

    pattern: re.Pattern[str]
    shown: str
    slot: str
    make: Callable[[re.Match[str]], Definition]


def dtype_of(match: re.Match[str]) -> Dtype:
    return "float32" if match["dtype"] == "f32" else "bfloat16"


def const(axis: str, value: int) -> Axis:
    """A constant axis.

    Raises:
        ValueError: it is empty.
    """
    if value < 1:
        raise ValueError(f"axis {axis} is {value}: it must be at least 1")
    return Axis(type="const", value=value)


def item_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: no kernel takes that dtype.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} has no kernels: one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
