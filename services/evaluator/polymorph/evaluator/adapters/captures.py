"""Captured inputs read without torch, checked against the definition that they are said to be of."""

import numpy as np

from polymorph.evaluator.domain.captured import activations
from polymorph.evaluator.domain.number import Floats, from_bfloat16
from polymorph.evaluator.domain.operation import Operation
from polymorph.workloads.tensors import Place, places

MOST_BYTES = 16 << 20
"""Of one call's file."""
_LARGEST = 1e12
"""Activations lie far below; beyond it a right kernel's own sums might overflow."""
_STORED = {"float32": "F32", "bfloat16": "BF16"}


class BadInputs(ValueError):
    """What was captured cannot be measured on; the text says why."""


def read(content: bytes, op: Operation) -> dict[str, Floats]:
    """The activations of one call, as float32, by their names in the definition.

    Raises:
        BadInputs: no safetensors file, a tensor that is missing, has another dtype or shape, or values that are not finite.
    """
    try:
        held = places(content)
    except ValueError as error:
        raise BadInputs(str(error)) from error
    names = activations(op)
    missing = [name for name in names if name not in held]
    if missing:
        raise BadInputs(f"it holds {', '.join(sorted(held)) or 'nothing'}, and not {', '.join(missing)}")
    found = {name: _tensor(name, held[name], content, op) for name in names}
    rows = {name: value.shape[0] for name, value in found.items()}
    if len(set(rows.values())) > 1:
        raise BadInputs(f"rows differ: {', '.join(f'{name} has {count}' for name, count in rows.items())}")
    return found


def _tensor(name: str, place: Place, content: bytes, op: Operation) -> Floats:
    spec = op.definition.inputs[name]
    if place.dtype != _STORED.get(spec.dtype):
        raise BadInputs(f"{name} is {place.dtype}: {op.definition.name} takes {spec.dtype}")
    wanted = [op.definition.axes[axis].value for axis in spec.shape or ()]
    fits = len(place.shape) == len(wanted) and all(
        size >= 1 if want is None else size == want for size, want in zip(place.shape, wanted, strict=True)
    )
    if not fits:
        shown = ", ".join("M" if want is None else str(want) for want in wanted)
        raise BadInputs(f"{name} has shape {list(place.shape)}: {op.definition.name} takes [{shown}]")
    raw = np.frombuffer(content, dtype=np.uint8, count=place.end - place.begin, offset=place.begin)
    flat = raw.copy()  # a tensor may begin at any byte
    values = flat.view(np.float32) if spec.dtype == "float32" else from_bfloat16(flat.view(np.uint16))
    if not bool(np.all(np.abs(values) <= _LARGEST)):
        raise BadInputs(f"{name} holds values that are not finite, or beyond {_LARGEST:g}")
    return values.reshape(place.shape)
