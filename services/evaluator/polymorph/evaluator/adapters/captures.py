"""Inputs that the evaluator's own engine captured, read without torch."""

import json
import struct
from pathlib import Path

import numpy as np

from polymorph.evaluator.domain.number import Floats, from_bfloat16

_MOST_HEADER = 1 << 20


def read_x(path: Path) -> Floats:
    """The tensor `x` of a safetensors file, as float32.

    Raises:
        ValueError: there is none that we can read.
    """
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 0)
    if length > _MOST_HEADER:
        raise ValueError(f"{path.name}: a header of {length} bytes")
    header = json.loads(data[8 : 8 + length])
    if "x" not in header:
        raise ValueError(f"{path.name}: holds {', '.join(header)}, no x")
    described = header["x"]
    begin, end = described["data_offsets"]
    raw = data[8 + length + begin : 8 + length + end]
    if described["dtype"] == "F32":
        values: Floats = np.frombuffer(raw, dtype=np.float32)
    elif described["dtype"] == "BF16":
        values = from_bfloat16(np.frombuffer(raw, dtype=np.uint16))
    else:
        raise ValueError(f"{path.name}: x is {described['dtype']}: F32 or BF16 is read")
    return values.reshape(described["shape"]).copy()
