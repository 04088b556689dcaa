"""A safetensors file read without torch, believing nothing that it says of itself."""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

MOST_HEADER = 1 << 20
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class NoTensors(ValueError):
    """It is no safetensors file, or says of itself what is not so; the text says which."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor's kind and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def places(content: bytes) -> dict[str, Place]:
    """Every tensor of a file by its name.

    Raises:
        NoTensors: a header that is none, a dtype that is unknown, or bytes that are too few or too many for a shape.
    """
    header, begin = _header(content)
    described = {name: value for name, value in header.items() if name != "__metadata__"}
    return {name: _place(name, value, begin, len(content)) for name, value in described.items()}


def _header(content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < 8:
        raise NoTensors(f"{len(content)} bytes are no safetensors file")
    (length,) = struct.unpack_from("<Q", content, 0)
    if length > min(MOST_HEADER, len(content) - 8):
        raise NoTensors(f"a header of {length} bytes in a file of {len(content)}: no safetensors file")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise NoTensors("its header is no JSON: no safetensors file") from error
    if not isinstance(header, dict):
        raise NoTensors("its header names no tensors: no safetensors file")
    return header, 8 + length


def _place(name: str, described: Any, begin: int, size: int) -> Place:
    try:
        dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
        item = ITEM_BYTES[dtype]
        whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
    except (TypeError, KeyError, ValueError) as error:
        raise NoTensors(f"tensor {name!r} is not described as safetensors asks for") from error
    if not whole or last < first or begin + last > size or last - first != math.prod(shape) * item:
        raise NoTensors(
            f"tensor {name!r}: {dtype} of shape {shape} does not lie at {first} to {last} of the file"
        )
    return Place(dtype, tuple(shape), begin + first, begin + last)
