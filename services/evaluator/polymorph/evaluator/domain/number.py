"""Numbers as tensors hold them: numpy has no bfloat16, so its bits travel as uint16."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

ITEM = {"float32": 4, "bfloat16": 2}
STORED: dict[str, npt.DTypeLike] = {"float32": np.float32, "bfloat16": np.uint16}
# Quiet NaNs that no kernel computes by chance.
POISON = {"float32": 0x7FC5A5A5, "bfloat16": 0x7FC5}


def unit_roundoff(dtype: str) -> float:
    return 2.0**-24 if dtype == "float32" else 2.0**-8


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def exact_in_bfloat16(values: Floats) -> Floats:
    """The nearest float32 values that bfloat16 holds exactly: what a checkpoint in bfloat16 gives."""
    return from_bfloat16(to_bfloat16(values))


def store(values: Floats, dtype: str) -> Array:
    """Values as the tensor's bytes hold them."""
    return to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values, dtype=np.float32)


def load(stored: Array, dtype: str) -> Floats:
    """The exact values of stored bytes."""
    return from_bfloat16(stored) if dtype == "bfloat16" else np.asarray(stored, dtype=np.float32)


def poison(stored: Array, dtype: str) -> None:
    """Fills a stored array with a NaN that only the evaluator writes."""
    bits: Array = stored.view(np.uint32 if dtype == "float32" else np.uint16)
    bits[...] = POISON[dtype]


def poisoned(stored: Array, dtype: str) -> int:
    """How many elements still hold the evaluator's NaN."""
    bits: Array = stored.view(np.uint32 if dtype == "float32" else np.uint16)
    return int(np.count_nonzero(bits == POISON[dtype]))
