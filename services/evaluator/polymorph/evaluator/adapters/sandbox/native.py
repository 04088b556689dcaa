"""The incumbent where no kernel is engaged: the very operations that vLLM runs on a CPU, called out of its library."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[list[Any], list[Any], int], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
_LIBRARIES = {
    "GENERIC": (),
    "AVX2": ("_C_AVX2",),
    "AVX512": ("_C_AVX512", "_C"),
    "AVX512_BF16": ("_C", "_C_AVX512"),
}
_PRIMITIVES = 32  # vLLM's own cache size for a layer


class NoNative(RuntimeError):
    """The engine's library is not here, so there is nothing to compare with."""


def load(isa: str) -> None:
    """Loads vLLM's operations for this tier, without importing vLLM.

    Raises:
        NoNative: vLLM is not installed, or has no library that loads here.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise NoNative("vLLM is not installed: install the extra `cpu`")
    folder = Path(found.submodule_search_locations[0])
    for name in _LIBRARIES.get(isa, ("_C",)) or ("_C", "_C_AVX2"):
        path = folder / f"{name}.abi3.so"
        if path.exists():
            torch.ops.load_library(str(path))
            return
    raise NoNative(f"{folder} holds no library of operations for ISA {isa}")


def set_threads(count: int) -> None:
    torch.set_num_threads(count)


def null_calls(count: int) -> None:
    """The path of a call with next to nothing to compute: what its dispatch costs, to be taken off its time."""
    layer = Linear([torch.zeros(16, 16)])
    x, y = torch.zeros(1, 16), torch.zeros(1, 16)
    for index in range(count):
        layer.run([x, None, None], [y], index)


def warm(kind: str, dtype: str) -> None:
    """One small call, so that libraries have opened and started what they need before the doors are locked."""
    form = _DTYPES[dtype]
    x, y, z = (torch.zeros(2, 16, dtype=form) for _ in range(3))
    if kind == "gemm":
        layer = Linear([torch.zeros(16, 16, dtype=form)])
        for bias in (None, torch.zeros(16, dtype=form)):
            layer.run([x, None, bias], [y], 0)
    elif kind == "rmsnorm":
        rms_norm([x, torch.ones(16, dtype=form), 1e-5], [y], 0)
    else:
        fused_add_rms_norm([x, x, torch.ones(16, dtype=form), 1e-5], [y, z], 0)


def tensor(buffer: Any, dtype: str, shape: list[int], strides: list[int] | None = None) -> Any:
    """A torch tensor over memory that is mapped already."""
    flat = torch.frombuffer(buffer, dtype=_DTYPES[dtype])
    if strides is None:
        return flat.view(shape)
    return flat.as_strided(shape, strides)


class Linear:
    """The unquantised linear layer of vLLM: oneDNN with prepacked weights, else torch's product, as vLLM chooses."""

    def __init__(self, weights: list[Any]) -> None:
        self._weights = weights
        try:
            create = torch.ops._C.create_onednn_mm_handler  # noqa: SLF001
            handles = [torch.tensor(create(weight.t(), _PRIMITIVES), dtype=torch.int64) for weight in weights]
        except (RuntimeError, AttributeError):
            handles = []
        self.path = "oneDNN" if handles else "torch"
        self._handles = handles

    def run(self, inputs: list[Any], outputs: list[Any], copy: int) -> None:
        x, _, bias = inputs
        index = copy % len(self._weights)
        if self._handles:
            torch.ops._C.onednn_mm.default(outputs[0], x, bias, self._handles[index])  # noqa: SLF001
        elif bias is None:
            torch.mm(x, self._weights[index].t(), out=outputs[0])
        else:
            torch.addmm(bias, x, self._weights[index].t(), out=outputs[0])


def rms_norm(inputs: list[Any], outputs: list[Any], copy: int) -> None:
    """The C++ rms_norm of vLLM."""
    del copy
    x, weight, eps = inputs
    torch.ops._C.rms_norm.default(outputs[0], x, weight, float(eps))  # noqa: SLF001


def fused_add_rms_norm(inputs: list[Any], outputs: list[Any], copy: int) -> None:
    """The C++ fused_add_rms_norm of vLLM, which works in place: the copies it needs here belong to its time."""
    del copy
    x, residual, weight, eps = inputs
    outputs[0].copy_(x)
    outputs[1].copy_(residual)
    torch.ops._C.fused_add_rms_norm.default(outputs[0], outputs[1], weight, float(eps))  # noqa: SLF001
