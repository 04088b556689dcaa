"""What a Triton kernel's source may hold, and what is refused before any of it runs."""

from pathlib import Path

import pytest

from polymorph.engine import gpu
from polymorph.engine.gpu.source import LAUNCH, SourceRefused, check, operation_of, sizes_of

KERNELS = sorted((Path(gpu.__file__).parent / "kernels").glob("*.py"))

KERNEL = """\
\"\"\"A kernel.\"\"\"

import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def tiles(y, x, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < D, other=0.0), mask=at < D)


def launch(y, x):
    tiles[(triton.cdiv(y.shape[-1], BLOCK),)](y, x, D=y.shape[-1], BLOCK=BLOCK, num_warps=4)
"""
LAST = KERNEL.splitlines()[-1]


def operation_of_file(path: Path) -> str:
    return next(name for name in sorted(LAUNCH, key=len, reverse=True) if path.stem.startswith(name))


def test_every_operation_has_two_kernels_of_ours() -> None:
    named = [operation_of_file(path) for path in KERNELS]
    assert {operation: named.count(operation) for operation in LAUNCH} == dict.fromkeys(LAUNCH, 2)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_of_ours_are_allowed(path: Path) -> None:
    check(path.read_text(), operation_of_file(path))


def test_a_plain_kernel_is_allowed() -> None:
    check(KERNEL, "silu_and_mul")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("import triton\n", "import triton\nimport os\n", "import os"),
        ("import triton\n", "import triton, socket\n", "import triton, socket"),
        ("import triton\n", "from triton import jit\nimport triton\n", "from triton import jit"),
        ("import triton.language as tl", "import triton.language as language", "at the top"),
        ("BLOCK = 128", "BLOCK = open('/etc/passwd')", "at the top"),
        ("BLOCK = 128", "BLOCK = 128\nprint(BLOCK)", "at the top"),
        ("BLOCK = 128", "BLOCK = 128\nclass A: pass", "at the top"),
        ("@triton.jit\n", "@triton.autotune(configs=[], key=[])\n@triton.jit\n", "decorated"),
        ("@triton.jit\n", "@triton.jit(debug=True)\n", "decorated"),
        ("D: tl.constexpr", "D: print(1)", "annotates"),
        ("D: tl.constexpr, BLOCK: tl.constexpr", "D=print(1), BLOCK=1", "no literal"),
        ("def launch(y, x)", "def launch(y, *x)", "plain parameters"),
        ("def launch(y, x)", "def launch(x, y)", "must take y, x"),
        ("def launch(y, x)", "def start(y, x)", "no host function launch"),
        ("tl.store(y", "tl.device_print('x', at)\n    tl.store(y", "no attribute that kernels use"),
        ("tl.store(y", "tl.inline_asm_elementwise(at)\n    tl.store(y", "no attribute that kernels use"),
        ("tl.store(y", "tl.core._semantic\n    tl.store(y", "no attribute that kernels use"),
        ("tl.store(y", "while True: pass\n    tl.store(y", "stands in a function"),
        (LAST, "    x.__class__", "no attribute that kernels use"),
        (LAST, "    x.data_ptr()", "no attribute that kernels use"),
        (LAST, "    triton.runtime.driver", "no attribute that kernels use"),
        (LAST, "    __import__('os')", "not known here"),
        (LAST, "    eval(x)", "not known here"),
        (LAST, "    launch(y, x)", "not known here"),
        (LAST, "    for i in range(9): pass", "stands in a function"),
        (LAST, "    [i for i in x]", "stands in an expression"),
        (LAST, "    (lambda: 0)()", "other than a name"),
        (LAST, "    n = 9 ** 9 ** 9", "operator"),
        (LAST, "    n = 1 << 99999999999", "operator"),
        (LAST, "    n = 'a' * 99999999999", "other than a number"),
        (LAST, "    tl = y", "another meaning"),
        (LAST, "    y.x = 1", "is no name"),
        (LAST, "    x[0] = 1", "is no name"),
        (LAST, "    with x: pass", "stands in a function"),
        (LAST, "    global BLOCK", "stands in a function"),
        (LAST, "    import os", "stands in a function"),
        (LAST, "    other[(1,)](y, x)", "no @triton.jit function"),
        (LAST, "    tiles[(1,)](*x)", "stands in an expression"),
        (LAST, "    tiles[(1,)](**x)", "unpacks"),
        (LAST, "    print = 1 +", "no Python"),
    ],
)
def test_what_could_reach_further_is_refused(old: str, new: str, reason: str) -> None:
    assert old in KERNEL
    with pytest.raises(SourceRefused, match=reason):
        check(KERNEL.replace(old, new, 1), "silu_and_mul")


def test_a_source_without_end_or_depth_is_refused() -> None:
    with pytest.raises(SourceRefused, match="at most 65536"):
        check(KERNEL + "#" * (1 << 28), "silu_and_mul")
    with pytest.raises(SourceRefused):
        check(KERNEL.replace(LAST, "    n = " + "(" * 3000 + "1" + ")" * 3000), "silu_and_mul")
    with pytest.raises(SourceRefused):
        check(KERNEL.replace(LAST, "    n = " + "-" * 30000 + "1"), "silu_and_mul")


def test_definitions_name_their_operation() -> None:
    assert operation_of("gemm_n960_k576_bf16") == "linear"
    assert operation_of("fused_add_rms_norm_h576_f16") == "fused_add_rms_norm"
    assert sizes_of("gemm_n960_k576_bf16") == ((960, 576), "bfloat16")
    with pytest.raises(SourceRefused, match="no slot on a GPU serves moe_e8"):
        operation_of("moe_e8")
    with pytest.raises(SourceRefused, match="has no slot"):
        check(KERNEL, "moe")
