"""Kernels of top-k and top-p: every variant keeps what a sort keeps, on rows that are hard for it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from polymorph.kernels.build import build
from polymorph.kernels.catalogue import solutions
from polymorph.kernels.catalogue.artifacts import Artifact, artifacts
from polymorph.kernels.definitions import definition_named, top_k_top_p_definition
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.isa import Isa
from polymorph.kernels.load import DtypeCode, Kernel, Tensor
from polymorph.kernels.toolchain import detect_toolchain, run_command

V, M = 1003, 8
INFINITE = float("inf")


def _grammar(x: Any) -> Any:
    return torch.where(torch.rand(M, V) < 0.99, -INFINITE, x)


def _one(x: Any) -> Any:
    alone = torch.full_like(x, -INFINITE)
    alone[torch.arange(M), torch.randint(V, (M,))] = 2.0
    return alone


def _odd(value: float) -> Callable[[Any], Any]:
    def change(x: Any) -> Any:
        x[0, 5] = x[-1, : V // 2] = value
        return x

    return change


ROWS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda x: x,
    "peaks": lambda x: x + (torch.rand(M, V) < 5 / V) * 12,
    "flat": lambda x: x * 0.01,
    "far from zero": lambda x: x + 1000,
    "huge": lambda x: x * 1e37,
    "tiny": lambda x: x * 1e-39,
    "whole numbers": lambda x: x.round(),
    "equal": lambda x: torch.full_like(x, 1.25),
    "zeros of both signs": lambda x: torch.where(x < 0, 0.0, -0.0),
    "grammar": _grammar,
    "one": _one,
    "none": lambda x: torch.full_like(x, -INFINITE),
    "not a number": _odd(float("nan")),
    "infinite": _odd(INFINITE),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, ...]:
    return artifacts(top_k_top_p_definition(V), folder=tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def context() -> Iterator[int]:
    with KernelHost.build().context(2) as address:
        yield address


def _view(tensor: Any) -> Tensor:
    if tensor is None:
        return Tensor.absent()
    code = DtypeCode[str(tensor.dtype).removeprefix("torch.")]
    return Tensor.at(tensor.data_ptr(), tuple(tensor.shape), code, tensor.stride())


def _reference() -> Any:
    scope: dict[str, Any] = {}
    exec(compile(top_k_top_p_definition(V).reference, "top_k_top_p", "exec"), scope)  # noqa: S102
    return scope["run"]


def _k_and_p() -> Iterator[tuple[Any, Any]]:
    k = torch.randint(1, 60, (M,), dtype=torch.int32)
    k[0], k[1], k[2] = V, 1, V - 1
    p = torch.rand(M).clamp_min(1e-3)
    p[0], p[1], p[2] = 1.0, 1e-9, 0.9
    yield k, None
    yield None, p
    yield k, p
    yield k.flip(0), p


def _same(found: Any, wanted: Any) -> Any:
    """By row: as many stay, and the same values. Of equal ones at the border any may stay, and a rounding may decide
    whether one more does.
    """
    stays, should = found != -INFINITE, wanted != -INFINITE
    one_of_many = (stays.sum(1) - should.sum(1)).abs() <= 1
    ties = torch.where(stays, found, INFINITE).amin(1) == torch.where(should, wanted, INFINITE).amin(1)
    return (stays == should).all(1) | (one_of_many & ties)


@pytest.mark.parametrize("kind", ROWS)
def test_every_variant_keeps_what_a_sort_keeps(built: Any, context: int, kind: str) -> None:
    torch.manual_seed(len(kind))
    logits, reference = ROWS[kind](torch.randn(M, V) * 3), _reference()
    for k, p in _k_and_p():
        wanted = reference(logits, k, p)
        for artifact in built:
            kernel, masked = Kernel(artifact.path), torch.full_like(logits, 5.0)
            inputs = [_view(logits), _view(k), _view(p)]
            assert kernel.run(context, inputs, [_view(masked)]) == 0, artifact.label
            assert _same(masked, wanted).all(), (artifact.label, k, p)
            stays = masked != -INFINITE
            assert torch.equal(masked[stays].nan_to_num(3), logits[stays].nan_to_num(3)), artifact.label
            place = logits.clone()
            assert kernel.run(context, [_view(place), *inputs[1:]], [_view(place)]) == 0
            assert torch.equal(place.nan_to_num(3), masked.nan_to_num(3)), f"{artifact.label} in place"


def test_sums_decide_as_exact_ones_do(built: Any, context: int) -> None:
    """Over many rows no kernel departs more often from float64 than a sort and a sum in float32 do."""
    torch.manual_seed(0)
    reference = _reference()
    logits, p = torch.randn(4096, V) * 2, torch.rand(4096)
    exact = reference(logits.double(), None, p).float()
    native = int((~_same(reference(logits, None, p), exact)).sum())
    for artifact in built[:2]:
        masked = torch.empty_like(logits)
        Kernel(artifact.path).run(context, [_view(logits), Tensor.absent(), _view(p)], [_view(masked)])
        stay = (masked != -INFINITE) == (exact != -INFINITE)
        assert int((~stay.all(1)).sum()) <= native + 4, artifact.label


def test_what_a_kernel_cannot_serve_it_refuses(built: Any, context: int) -> None:
    logits = torch.randn(2, V)
    kernel = Kernel(built[0].path)
    for k in (0, V + 1):
        bad = torch.tensor([1, k], dtype=torch.int32)
        before = logits.clone()
        assert kernel.run(context, [_view(logits), _view(bad), Tensor.absent()], [_view(logits)]) != 0
        assert torch.equal(logits, before)
    wide = torch.randn(2, V + 1)
    assert kernel.run(context, [_view(wide), Tensor.absent(), Tensor.absent()], [_view(wide)]) != 0


def test_variants_are_distinct(built: Any) -> None:
    assert len({artifact.digest for artifact in built}) == len(built) >= 4


@pytest.mark.parametrize("isa", [Isa.GENERIC, Isa.AVX2, Isa.AVX512])
def test_every_tier_compiles_without_a_warning(tmp_path: Any, isa: Isa) -> None:
    for vocabulary in (3072, 49152):
        for solution in solutions(top_k_top_p_definition(vocabulary), isa)[4:6]:
            assert build(solution, tmp_path / solution.name, detect_toolchain(), run_command).log == ""


def test_a_name_tells_its_definition() -> None:
    definition = top_k_top_p_definition(49152)
    assert definition_named("top_k_top_p_v49152_f32") == definition
    assert definition.x_polymorph.optional_inputs == ("k", "p")
