"""The slots as torch operators: opaque to torch.compile, so that a graph calls the slot whatever is engaged in it.

They are written in Python. In a captured graph that costs nothing, since the call happened when it was captured; in eager
mode `benchmarks/gpu_hotswap.py` measures what they add. Inference only: they have no gradient.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from polymorph.engine.gpu.slots import Entry, SlotTable

NAMESPACE = "polymorph_gpu"
_ALIGNMENT = 16
_SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "fused_add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "silu_and_mul": "(Tensor x) -> Tensor",
    "linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
}
_slots: SlotTable | None = None
_threads = threading.local()


def serve(slots: SlotTable) -> Any:
    """Makes the operators use `slots` from now on; gives `torch.ops.polymorph_gpu`."""
    global _slots  # noqa: PLW0603 - operators are one for a process
    _slots = slots
    _register()
    return torch.ops.polymorph_gpu


@contextmanager
def serving(slots: SlotTable) -> Iterator[Any]:
    """The operators use `slots` in this thread alone, and the process's own again afterwards."""
    before = getattr(_threads, "slots", None)
    _threads.slots = slots
    _register()
    try:
        yield torch.ops.polymorph_gpu
    finally:
        _threads.slots = before


def replace_native(operation: str, native: Callable[..., Any]) -> None:
    """The code that serves where no kernel is engaged: the engine's own instead of plain torch."""
    if operation not in NATIVE:
        raise ValueError(f"{operation!r} has no slot on a GPU: one of {', '.join(NATIVE)}")
    NATIVE[operation] = native


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    entry = _find("rms_norm", (x.shape[-1],), x, weight)
    if entry is None:
        return NATIVE["rms_norm"](x, weight, eps)
    y = torch.empty_like(x)
    _launch(entry, y, x, weight, eps)
    return y


def _fused_add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    entry = _find("fused_add_rms_norm", (x.shape[-1],), x, residual, weight)
    if entry is None:
        normed, carried = NATIVE["fused_add_rms_norm"](x, residual, weight, eps)
        return normed, carried
    y, residual_out = torch.empty_like(x), torch.empty_like(residual)
    _launch(entry, y, residual_out, x, residual, weight, eps)
    return y, residual_out


def _silu_and_mul(x: Any) -> Any:
    d = x.shape[-1] // 2
    entry = _find("silu_and_mul", (d,), x)
    if entry is None:
        return NATIVE["silu_and_mul"](x)
    y = x.new_empty((*x.shape[:-1], d))
    _launch(entry, y, x)
    return y


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    n, k = weight.shape
    entry = _find("linear", (n, k), x, weight, *(() if bias is None else (bias,)))
    if entry is None:
        return NATIVE["linear"](x, weight, bias)
    y = x.new_empty((*x.shape[:-1], n))
    floats = entry.kernel.scratch_floats(x.numel() // k, n, k)
    # Allocated here, so that a captured graph owns it: its memory lives in the graph's own pool.
    scratch = torch.empty(floats, dtype=torch.float32, device=x.device) if floats else None
    _launch(entry, y, x, weight, bias, scratch)
    return y


def _find(operation: str, sizes: tuple[int, ...], x: Any, *others: Any) -> Entry | None:
    slots = _serving()
    if slots is None or not x.shape[-1]:
        return None
    entry = slots.find(operation, sizes, x.dtype, x.numel() // x.shape[-1])
    if entry is None or not all(_plain(tensor, x) for tensor in (x, *others)):
        return None
    return entry


def _plain(tensor: Any, x: Any) -> bool:
    # Another alignment would be another specialisation, compiled in the middle of a step.
    same = tensor.dtype == x.dtype and tensor.device == x.device
    return bool(same and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0)


def _launch(entry: Entry, *arguments: Any) -> None:
    entry.kernel.launch(*arguments)
    slots = _serving()
    if slots is not None:
        slots.counters.served(entry.cell)


def _serving() -> SlotTable | None:
    return getattr(_threads, "slots", None) or _slots


def _native_fused(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    # Normed before it is rounded, as the definition says.
    wide = x.float() + residual.float()
    normed = functional.rms_norm(wide, (wide.shape[-1],), weight.float(), eps)
    return normed.to(x.dtype), wide.to(x.dtype)


def _native_silu(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


NATIVE: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: functional.rms_norm(x, (x.shape[-1],), weight, eps),
    "fused_add_rms_norm": _native_fused,
    "silu_and_mul": _native_silu,
    "linear": functional.linear,
}


@functools.cache
def _register() -> Any:
    library = torch.library.Library(NAMESPACE, "DEF")
    served = {
        "rms_norm": (_rms_norm, lambda x, *_: torch.empty_like(x)),
        "fused_add_rms_norm": (
            _fused_add_rms_norm,
            lambda x, r, *_: (torch.empty_like(x), torch.empty_like(r)),
        ),
        "silu_and_mul": (_silu_and_mul, lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2))),
        "linear": (_linear, lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0]))),
    }
    for name, schema in _SCHEMAS.items():
        function, fake = served[name]
        library.define(name + schema)
        for backend in ("CUDA", "CPU"):
            library.impl(name, function, backend)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library
