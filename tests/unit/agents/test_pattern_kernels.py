"""Every pattern builds, passes inspection and computes what float64 does, on ragged shapes and poisoned outputs."""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from polymorph.compiler.domain.agents.linear import LinearPattern
from polymorph.compiler.domain.agents.proposer import PatternProposer, vocabulary_for
from polymorph.kernels.build import build, solution_isa
from polymorph.kernels.definitions import (
    fused_add_rms_norm_definition,
    linear_definition,
    rms_norm_definition,
)
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.inspect import inspect_library
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.load import Buffer, DtypeCode, Kernel, Tensor
from polymorph.kernels.schema import Definition, Solution
from polymorph.kernels.toolchain import detect_toolchain, run_command

ODD = 37, 29  # columns that fill no panel, and an odd K
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensor(value: torch.Tensor) -> Tensor:
    code = DtypeCode[str(value.dtype).removeprefix("torch.")]
    return Tensor.at(value.data_ptr(), tuple(value.shape), code, value.stride())


def compiled(solution: Solution, definition: Definition, folder: Path) -> Kernel:
    """Built without a warning, inspected and loaded."""
    built = build(solution, folder / solution.digest()[:16], detect_toolchain(), run_command)
    assert built.log == ""
    packs = definition.x_polymorph.packed_inputs != ()
    inspect_library(built.content(), packs=packs, isa=solution_isa(solution))
    return Kernel.from_content(built.content(), folder)


def poisoned(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(sizes, math.nan, dtype=dtype)


def packed(kernel: Kernel, context: int, weight: torch.Tensor) -> Buffer:
    size = kernel.pack_bytes(tensor(weight))
    assert size > 0
    buffer = Buffer(size)
    assert kernel.pack(context, tensor(weight), buffer.address) == 0
    return buffer


def check_linear(kernel: Kernel, context: int, definition: Definition, m: int, *, bias: bool) -> None:
    dtype = TORCH[definition.inputs["x"].dtype]
    n, k = definition.axes["N"].value or 0, definition.axes["K"].value or 0
    x = torch.randn(m, k + 3).to(dtype)[:, :k]  # rows that do not touch
    weight = torch.randn(n, k).bfloat16().to(dtype)
    offset = torch.randn(n).to(dtype)
    y = poisoned(m + 1, n, dtype=dtype)
    buffer = packed(kernel, context, weight)
    inputs = [
        tensor(x),
        Tensor.packed(buffer.address, buffer.size),
        tensor(offset) if bias else Tensor.absent(),
    ]
    assert kernel.run(context, inputs, [tensor(y[:m])]) == 0
    wide = x.double() @ weight.double().T + (offset.double() if bias else 0)
    # What summing k products in float32 in any order may lose, and the rounding of the output.
    bound = (x.double().abs() @ weight.double().abs().T + 1) * 2**-24 * (k + 2)
    if dtype is torch.bfloat16:
        bound += wide.abs() * 2**-8
    assert bool(((y[:m].double() - wide).abs() <= bound).all())
    assert bool(y[m].isnan().all()), "it wrote beyond its output"


def check_norm(kernel: Kernel, context: int, definition: Definition, m: int, *, in_place: bool) -> None:
    dtype = TORCH[definition.inputs["x"].dtype]
    h = definition.axes["H"].value or 0
    fused = "residual" in definition.inputs
    x, residual, weight = (
        torch.randn(m, h).to(dtype),
        torch.randn(m, h).to(dtype),
        torch.randn(h).to(dtype),
    )
    eps = torch.tensor([1e-5])
    wide = x.double() + (residual.double() if fused else 0)
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    y = x if in_place else poisoned(m, h, dtype=dtype)
    summed = residual if in_place else poisoned(m, h, dtype=dtype)
    inputs = [x, residual, weight, eps] if fused else [x, weight, eps]
    outputs = [y, summed] if fused else [y]
    assert kernel.run(context, [tensor(t) for t in inputs], [tensor(t) for t in outputs]) == 0
    relative = 2**-8 if dtype is torch.bfloat16 else 2**-24 * 32
    assert bool(((y.double() - expected).abs() <= expected.abs() * relative + 1e-30).all())
    if fused:
        assert bool(((summed.double() - wide).abs() <= wide.abs() * relative).all())


@pytest.fixture(scope="module")
def context() -> Iterator[int]:
    torch.manual_seed(7)
    with KernelHost.build().context(2) as address:
        yield address


def solutions(definition: Definition, max_m: int, isa: Isa) -> list[Solution]:
    """The bases of a vocabulary and all that differs from one in one choice."""
    vocabulary: Any = vocabulary_for(definition, max_m, isa)
    proposer: PatternProposer[Any] = PatternProposer(
        definition, 1, max_m, vocabulary, rng=Random(1), batch=10_000
    )
    return proposer.next([])


def cases(*arguments: tuple[Definition, int], rows: int = 0) -> list[Any]:
    """All solutions, or with `rows` those whose register blocks are at least so high (slower to compile)."""
    made = [
        (d, max_m, s)
        for d, max_m in arguments
        for s in solutions(d, max_m, detect_isa())
        if int(s.x_polymorph.params.get("rows", 0)) >= rows
    ]
    return [
        pytest.param(d, m, s, id=f"{d.name}-{m}-{s.digest()[:6]}-{s.x_polymorph.pattern}") for d, m, s in made
    ]


@pytest.mark.parametrize(
    ("definition", "max_m", "solution"),
    cases((linear_definition(*ODD, "float32"), 3), (linear_definition(*ODD, "float32"), 1))
    + cases((linear_definition(*ODD, "float32"), 13), rows=8),
)
def test_linear_float32(
    definition: Definition, max_m: int, solution: Solution, context: int, tmp_path: Path
) -> None:
    kernel = compiled(solution, definition, tmp_path)
    for m in {1, 2, 5, max_m, 70}:
        check_linear(kernel, context, definition, m, bias=m % 2 == 1)


@pytest.mark.parametrize(("definition", "max_m", "solution"), cases((linear_definition(*ODD, "bfloat16"), 2)))
def test_linear_bfloat16(
    definition: Definition, max_m: int, solution: Solution, context: int, tmp_path: Path
) -> None:
    kernel = compiled(solution, definition, tmp_path)
    for m in (1, max_m, 9):
        check_linear(kernel, context, definition, m, bias=m == 9)


@pytest.mark.parametrize(
    ("definition", "max_m", "solution"),
    cases((fused_add_rms_norm_definition(37, "float32"), 8), (rms_norm_definition(67, "bfloat16"), 8))
    + cases((rms_norm_definition(37, "float32"), 1), (fused_add_rms_norm_definition(67, "bfloat16"), 1)),
)
def test_norms(definition: Definition, max_m: int, solution: Solution, context: int, tmp_path: Path) -> None:
    kernel = compiled(solution, definition, tmp_path)
    for m in (1, 3, max_m, 33):
        check_norm(kernel, context, definition, m, in_place=False)
        check_norm(kernel, context, definition, m, in_place=True)


@pytest.mark.parametrize("isa", [Isa.GENERIC, Isa.AVX512, Isa.AVX512_BF16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_tiers_compile(isa: Isa, dtype: Any, tmp_path: Path) -> None:
    for definition in (linear_definition(*ODD, dtype), rms_norm_definition(37, dtype)):
        vocabulary: Any = vocabulary_for(definition, 8, isa)
        for pattern in vocabulary.bases():
            proposer: PatternProposer[Any] = PatternProposer(
                definition, 1, 8, vocabulary, rng=Random(1), seeds=[pattern.params()], batch=1
            )
            (solution,) = proposer.next([])
            build(solution, tmp_path / solution.digest(), detect_toolchain(), run_command)


def test_even_shapes_compile_without_a_warning(tmp_path: Path) -> None:
    definition = linear_definition(48, 64, "float32")
    for solution in solutions(definition, 3, detect_isa())[:8]:
        compiled(solution, definition, tmp_path)


def test_dot_products_are_proposed_where_the_machine_has_them() -> None:
    definition = linear_definition(*ODD, "bfloat16")
    engines = {s.x_polymorph.params["engine"] for s in solutions(definition, 8, Isa.AVX512_BF16)}
    assert "dot" in engines
    assert "dot" not in {s.x_polymorph.params["engine"] for s in solutions(definition, 8, Isa.AVX512)}


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    definition = linear_definition(*ODD, "float32")
    return compiled(solutions(definition, 8, detect_isa())[0], definition, tmp_path)


def test_a_weight_that_bfloat16_cannot_hold_is_refused(kernel: Kernel, context: int) -> None:
    weight = torch.randn(ODD).bfloat16().float()
    weight[36, 28] += 2**-20
    buffer = Buffer(kernel.pack_bytes(tensor(weight)))
    assert kernel.pack(context, tensor(weight), buffer.address) == 2
    assert kernel.pack(context, tensor(weight.bfloat16().float()), buffer.address) == 0


def test_another_weight_is_refused(kernel: Kernel) -> None:
    assert kernel.pack_bytes(tensor(torch.zeros(37, 28))) < 0
    assert kernel.pack_bytes(tensor(torch.zeros(37, 29, dtype=torch.bfloat16))) < 0


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(kernel: Kernel, context: int) -> None:
    weight = torch.randn(ODD).bfloat16().float()
    buffer = packed(kernel, context, weight)
    right = Tensor.packed(buffer.address, buffer.size)
    x, y = torch.randn(3, 29), poisoned(3, 37, dtype=torch.float32)
    wrong = [
        ([tensor(torch.randn(3, 28)), right, Tensor.absent()], [tensor(y)]),
        ([tensor(x), tensor(weight), Tensor.absent()], [tensor(y)]),
        ([tensor(x), Tensor.packed(buffer.address, buffer.size - 1), Tensor.absent()], [tensor(y)]),
        ([tensor(x), right, tensor(torch.zeros(36))], [tensor(y)]),
        ([tensor(x), right], [tensor(y)]),
        ([tensor(x), right, Tensor.absent()], [tensor(y[:2])]),
        ([tensor(x), right, Tensor.absent()], [tensor(y.T.contiguous().T)]),
    ]
    for inputs, outputs in wrong:
        assert kernel.run(context, inputs, outputs) != 0
    assert bool(y.isnan().all())


def test_one_layout_serves_every_blocking(context: int, tmp_path: Path) -> None:
    definition = linear_definition(*ODD, "float32")
    vocabulary: Any = vocabulary_for(definition, 8, detect_isa())
    base = next(iter(vocabulary.bases()))
    assert isinstance(base, LinearPattern)
    by_layout: dict[str, set[str]] = {}
    for pattern in chain([base], vocabulary.neighbours(base)):
        layout = vocabulary.sources(pattern)[0].content
        by_layout.setdefault(layout, set()).add(f"{pattern.storage}{pattern.panel}")
    assert all(len(kinds) == 1 for kinds in by_layout.values())
    assert len(by_layout) < 10
