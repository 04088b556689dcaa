"""From captured calls to the inputs of a self-test, for any definition, by its schema alone."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from polymorph.kernels.schema import Definition, TensorSpec

Inputs = dict[str, Any]

_DEFAULTS = {"eps": 1e-5}
"""Scalars that a capture need not hold, since every value near it serves as well."""
_MOST_BYTES = 128 << 20
"""What the rows of a sample read and write at most, weights apart: a row of attention reads all of its context."""


class Unfit(ValueError):
    """What was captured is no call of the definition; the text says where."""


@dataclass(frozen=True)
class Sample:
    """One call to try: a tensor or None for each input, in the definition's order."""

    label: str
    inputs: Inputs


def read(calls: tuple[str, ...], weight: str | None) -> list[Inputs]:
    """Captured calls, each with the weights that `weight` holds for all of them."""
    shared = load_file(weight) if weight is not None else {}
    return [{**load_file(path), **shared} for path in calls]


def samples(definition: Definition, calls: list[Inputs], rows: tuple[int, ...]) -> Iterator[Sample]:
    """Every number of rows at least once, and every call.

    Calls are joined along the bucket axis, so that a sample has rows of all of them; but where an input is of integers,
    it may index what else is in its own call: then each call is tried by itself.

    Raises:
        Unfit: what was captured is no call of the definition.
    """
    axis = definition.x_polymorph.bucket_axis
    for call in calls:
        _check(definition, call)
    if not any(_integer(spec) for spec in definition.inputs.values()):
        calls = [_joined(definition, calls, axis)]
    optional = definition.x_polymorph.optional_inputs
    for index in range(max(len(calls), len(rows))):
        call = calls[index % len(calls)]
        count = min(rows[index % len(rows)], _affordable(definition, call, axis))
        inputs = _shaped(definition, call, axis, count)
        absent = [name for name in optional if inputs[name] is None]
        filled = _filled(definition, inputs, absent)
        # What was captured has no such input; another layer of the definition may. Tried in turn, and first of all.
        if filled is None or index % 2 == 0:
            yield Sample(f"M = {count}", inputs)
        if filled is not None and (index % 2 == 1 or index == 0):
            yield Sample(f"M = {count} with {', '.join(absent)}", filled)


def _joined(definition: Definition, calls: list[Inputs], axis: str) -> Inputs:
    joined = dict(calls[0])
    for name, spec in definition.inputs.items():
        if name in joined and spec.shape is not None and axis in spec.shape:
            joined[name] = torch.cat([call[name] for call in calls], dim=spec.shape.index(axis))
    return joined


def _shaped(definition: Definition, call: Inputs, axis: str, count: int) -> Inputs:
    # An axis such as M+1 ties rows together in a way that no cutting keeps: such a call stays as it was captured.
    whole = any(_depends(spec, axis) for spec in definition.inputs.values())
    shaped: Inputs = {}
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            shaped[name] = _scalar(definition, name, call.get(name), spec.dtype)
        elif name not in call:
            shaped[name] = None
        else:
            shaped[name] = call[name] if whole else _cut(call[name], spec, axis, count)
    return shaped


def _affordable(definition: Definition, call: Inputs, axis: str) -> int:
    """How many rows of this call are quick to compute by the references too; one at least."""
    sizes = _sizes(definition, {name: call.get(name) for name in definition.inputs})
    # The expression is our own text, of this very installation.
    one, two = (int(eval(definition.x_polymorph.bytes, {}, sizes | {axis: m})) for m in (1, 2))  # noqa: S307
    return max(1, _MOST_BYTES // max(1, two - one))


def _depends(spec: TensorSpec, axis: str) -> bool:
    return any(size != axis and axis in re.findall(r"[A-Za-z_]\w*", size) for size in spec.shape or ())


def _cut(tensor: Any, spec: TensorSpec, axis: str, count: int) -> Any:
    if axis not in (spec.shape or ()):
        return tensor.contiguous()
    along = (spec.shape or ()).index(axis)
    if tensor.shape[along] == 0:
        raise Unfit(f"a call of no rows was captured: {tuple(tensor.shape)}")
    return tensor.index_select(along, torch.arange(count) % tensor.shape[along]).contiguous()


def _scalar(definition: Definition, name: str, captured: Any, dtype: str) -> Any:
    form = getattr(torch, dtype)
    if captured is not None and captured.numel():
        return captured.reshape(-1)[:1].to(form).contiguous()
    if name in _DEFAULTS:
        return torch.tensor([_DEFAULTS[name]], dtype=form)
    if name in definition.x_polymorph.optional_inputs:
        return None
    raise Unfit(f"no value of the scalar {name} of {definition.name} was captured")


def _check(definition: Definition, call: Inputs) -> None:
    for name, spec in definition.inputs.items():
        if spec.shape is not None and name in call:
            _check_tensor(definition, name, call[name])
        elif spec.shape is not None and name not in definition.x_polymorph.optional_inputs:
            raise Unfit(f"no input {name} was captured, and {definition.name} has no call without")


def _check_tensor(definition: Definition, name: str, tensor: Any) -> None:
    spec = definition.inputs[name]
    shape = spec.shape or ()
    fits = tensor.ndim == len(shape) and all(
        known is None or size == known
        for size, known in zip(tensor.shape, _constants(definition, shape), strict=True)
    )
    if not fits or tensor.dtype is not getattr(torch, spec.dtype):
        raise Unfit(
            f"input {name} of {definition.name} was captured as {tuple(tensor.shape)} of {tensor.dtype}: "
            f"the definition has {list(_constants(definition, shape))} of {spec.dtype}"
        )


def _constants(definition: Definition, shape: tuple[str, ...]) -> tuple[int | None, ...]:
    axes = definition.axes
    return tuple(
        axes[size].value if size in axes else int(size) if size.isdigit() else None for size in shape
    )


def _filled(definition: Definition, inputs: Inputs, absent: list[str]) -> Inputs | None:
    """The same with values for `absent`; None where there are none, or values cannot be made up."""
    sizes = _sizes(definition, inputs)
    filled = dict(inputs)
    for name in absent:
        spec = definition.inputs[name]
        if spec.shape is None or _integer(spec) or not all(size in sizes for size in spec.shape):
            return None
        shape = [sizes[size] for size in spec.shape]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        filled[name] = values.to(getattr(torch, spec.dtype))
    return filled if absent else None


def _sizes(definition: Definition, inputs: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    for name, tensor in inputs.items():
        shape = definition.inputs[name].shape
        if tensor is not None and shape is not None:
            sizes |= dict(zip(shape, map(int, tensor.shape), strict=True))
    return sizes


def _integer(spec: TensorSpec) -> bool:
    form = getattr(torch, spec.dtype)
    return spec.shape is not None and not form.is_floating_point
