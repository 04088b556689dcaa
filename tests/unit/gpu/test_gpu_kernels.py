"""Our Triton kernels: computed by Triton's interpreter, and compiled to machine code of real GPUs, both without one.

`make test-gpu-kernels` runs this in an environment with Triton, once in each of its two modes: the interpreter is chosen
when Triton is imported. It has no bfloat16, so float32 and float16 are computed, and bfloat16 is compiled.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from polymorph.engine import gpu
from polymorph.engine.gpu import reference, selftest
from polymorph.engine.gpu.artifact import TritonKernel, keep, load, toolchain
from polymorph.engine.gpu.selftest import Case, SelfTestFailed, check
from polymorph.engine.gpu.source import LAUNCH

KERNELS = sorted((Path(gpu.__file__).parent / "kernels").glob("*.py"))
SIZES = {"rms_norm": (96,), "fused_add_rms_norm": (1100,), "silu_and_mul": (96,), "linear": (40, 200)}
REAL = {"rms_norm": (4096,), "fused_add_rms_norm": (4096,), "silu_and_mul": (14336,), "linear": (4096, 4096)}
MISSING = importlib.util.find_spec("triton") is None
WITHOUT = "triton is not installed" if MISSING else ""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}

pytestmark = [
    # The interpreter computes with numpy, which tells of each exponential that overflows.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
interpreted = pytest.mark.skipif(MISSING or not INTERPRETED, reason=WITHOUT or "needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(MISSING or INTERPRETED, reason=WITHOUT or "the interpreter compiles nothing")
each_kernel = pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)

Load = Callable[[Path], TritonKernel]


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    def by_path(path: Path) -> TritonKernel:
        return load(keep(path.read_text(), tmp_path), _operation(path))

    return by_path


def _operation(path: Path) -> str:
    return next(name for name in sorted(LAUNCH, key=len, reverse=True) if path.stem.startswith(name))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@each_kernel
def test_a_kernel_computes_its_definition(loaded: Load, path: Path, dtype: str) -> None:
    kernel = loaded(path)
    case = Case(str(kernel.path), kernel.operation, SIZES[kernel.operation], dtype, max_m=32, device="cpu")
    assert check(kernel, case) <= 1.0


@interpreted
@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        ("silu_and_mul_flat", "tl.sigmoid(gate)", "tl.sigmoid(up)", "of its tolerance"),
        ("rms_norm_row", "/ H + eps", "/ BLOCK + eps", "of its tolerance"),
        ("linear_split_k", "if BIAS:", "if not BIAS:", "of its tolerance"),
        ("silu_and_mul_tiles", "mask=at < D)\n\n", "mask=at < D - 1)\n\n", "of its tolerance"),
    ],
)
def test_the_self_test_finds_a_wrong_kernel(tmp_path: Path, name: str, old: str, new: str, what: str) -> None:
    path = next(path for path in KERNELS if path.stem == name)
    source = path.read_text()
    assert old in source
    kernel = load(keep(source.replace(old, new), tmp_path), _operation(path))
    case = Case(str(kernel.path), kernel.operation, SIZES[kernel.operation], "float32", 8, device="cpu")
    with pytest.raises(SelfTestFailed, match=what):
        check(kernel, case)


@interpreted
def test_the_self_test_runs_in_a_process_of_its_own(loaded: Load) -> None:
    kernel = loaded(next(path for path in KERNELS if path.stem == "silu_and_mul_flat"))
    case = Case(str(kernel.path), kernel.operation, (96,), "float32", 4, device="cpu")
    assert selftest.in_process(case) <= 1.0
    kernel.path.chmod(0o600)
    kernel.path.write_text("import os")
    with pytest.raises(SelfTestFailed, match="holds other content"):
        selftest.in_process(case)
    with pytest.raises(SelfTestFailed, match="did not end within"):
        selftest.in_process(case, timeout_s=0.01)


class Launches:
    """Stands for a kernel of a module, and notes what it is launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size >= 1 for size in grid)
        return lambda *arguments, **named: self.calls.append((arguments, named))


def _launches(kernel: TritonKernel, arguments: tuple[Any, ...]) -> dict[str, Launches]:
    module: ModuleType = kernel.module
    functions = {name: value for name, value in vars(module).items() if hasattr(value, "arg_names")}
    noted = {name: Launches() for name in functions}
    module.__dict__.update(noted)
    try:
        kernel.launch(*arguments)
    finally:
        module.__dict__.update(functions)
    return noted


def _arguments(operation: str, m: int, dtype: Any) -> tuple[Any, ...]:
    *given, last = reference.inputs(operation, REAL[operation], m, dtype, "cpu", seed=0)
    y = torch.empty(m, REAL[operation][0], dtype=dtype)
    match operation:
        case "linear":
            return y, *given, last, torch.empty(1)
        case "fused_add_rms_norm":
            return y, y, *given, last
        case _:
            return y, *given, last


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_kernel
def test_a_kernel_compiles_for_a_gpu(loaded: Load, path: Path, dtype: Any, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = loaded(path)
    made = 0
    for m in (1, 8):
        noted = _launches(kernel, _arguments(kernel.operation, m, dtype))
        for name, launches in noted.items():
            function = getattr(kernel.module, name)
            for arguments, named in launches.calls:
                constants = {key: value for key, value in named.items() if key in function.arg_names}
                kinds = dict.fromkeys(constants, "constexpr")
                given = dict(zip(function.arg_names, arguments, strict=False))
                signature = {key: kinds.get(key) or _kind(given[key]) for key in function.arg_names}
                code = triton.compile(
                    ASTSource(function, signature, constants),
                    target=GPUTarget("cuda", capability, 32),
                    options={key: value for key, value in named.items() if key not in constants},
                )
                assert code.metadata.shared <= 100 * 1024
                assert len(code.asm["cubin"]) > 0
                made += 1
    assert made >= 2


def _kind(value: Any) -> str:
    if torch.is_tensor(value):
        return DTYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@compiled
def test_the_toolchain_tells_what_decides_bits() -> None:
    assert toolchain().startswith("triton 3.")
    assert toolchain().endswith("fp-fusion=1")
