"""What the definition's own code computes, and how far an output is from it."""

from collections.abc import Mapping
from typing import Any

import torch

from polymorph.engine.selftest_inputs import Inputs
from polymorph.kernels.schema import Definition


def reference(definition: Definition, inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """What the definition's own code computes; its floating-point inputs as `dtype` where one is given."""
    # The reference is our own text, of this very installation: no candidate can write it.
    space: dict[str, Any] = {}
    exec(compile(definition.reference, definition.name, "exec"), space)  # noqa: S102
    changed = set(definition.x_polymorph.output_aliases.values())
    cast = {name: _cast(tensor, dtype, copy=name in changed) for name, tensor in inputs.items()}
    result = space["run"](**cast)
    if isinstance(result, Mapping):
        return {name: result[name] for name in definition.outputs}
    listed = result if isinstance(result, tuple | list) else (result,)
    return dict(zip(definition.outputs, listed, strict=True))


def _cast(tensor: Any, dtype: Any, *, copy: bool) -> Any:
    if tensor is None:
        return None
    form = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.to(form, copy=copy)


def decided(output: Any, truth: Any, native: Any) -> Any:
    """The truth; but where the references themselves differ about an infinity (a row that is cut at a near tie), either is
    right: that which the output took.
    """
    wide = native.to(torch.float64)
    undecided = truth.isfinite() != wide.isfinite()
    return torch.where(undecided & (output.isfinite() != truth.isfinite()), wide, truth.to(torch.float64))


def error_of(output: Any, truth: Any) -> float:
    """Root mean square, relative to that of the truth; not a number where an infinity or a hole is not where it belongs."""
    finite = truth.isfinite()
    wide = output.to(torch.float64)
    beyond, wanted = wide[~finite], truth[~finite].to(torch.float64)
    if not bool(((beyond == wanted) | (beyond.isnan() & wanted.isnan())).all()):
        return float("nan")
    if not bool(finite.any()):
        return 0.0
    difference, kept = wide[finite] - truth[finite], truth[finite]
    return float(difference.square().mean().sqrt() / kept.square().mean().sqrt().clamp_min(1e-30))
