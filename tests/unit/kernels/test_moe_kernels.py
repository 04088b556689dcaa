"""Experts: the definition, and kernels of the catalogue on ragged shapes and lopsided routing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polymorph.kernels.build import build
from polymorph.kernels.catalogue.artifacts import Artifact, artifacts
from polymorph.kernels.catalogue.moe import PATTERNS, moe_solution
from polymorph.kernels.definitions import definition_named, moe_definition
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.inspect import inspect_library
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.load import Buffer, DtypeCode, Kernel, Tensor
from polymorph.kernels.schema import Definition
from polymorph.kernels.toolchain import detect_toolchain, run_command

# No width is a multiple of a vector, and one is odd.
EXPERTS, TOPK, HIDDEN, INNER = 5, 3, 51, 22
RAGGED = moe_definition(EXPERTS, TOPK, HIDDEN, INNER, "float32")
MANY = 6000  # tokens that need the scratch memory more than once


@pytest.fixture(scope="module")
def kernels() -> tuple[Artifact, ...]:
    return artifacts(RAGGED)


@pytest.fixture(scope="module")
def context() -> Iterator[int]:
    with KernelHost.build().context(2) as address:
        yield address


def view(tensor: Any) -> Tensor:
    code = DtypeCode[str(tensor.dtype).removeprefix("torch.")]
    return Tensor.at(tensor.data_ptr(), tuple(tensor.shape), code, tensor.stride())


def reference(definition: Definition) -> Any:
    scope: dict[str, Any] = {}
    exec(definition.reference, scope)  # noqa: S102
    return scope["run"]


def weights(dtype: Any = torch.float32) -> tuple[Any, Any]:
    made = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 7, torch.randn(EXPERTS, HIDDEN, INNER) / 7
    return tuple(each.bfloat16().to(dtype) for each in made)


class Packed:
    """A kernel with weights that it packed."""

    def __init__(self, path: Path, context: int, *given: Any) -> None:
        self.kernel, self._context, self._held = Kernel(path), context, []
        for weight in given:
            buffer = Buffer(self.kernel.pack_bytes(view(weight)))
            assert self.kernel.pack(context, view(weight), buffer.address) == 0
            self._held.append(buffer)

    def __call__(self, x: Any, shares: Any, ids: Any, status: int = 0) -> Any:
        y = torch.full((x.shape[0], HIDDEN), float("nan"), dtype=x.dtype)
        packed = [Tensor.packed(buffer.address, buffer.size) for buffer in self._held]
        assert (
            self.kernel.run(self._context, [view(x), *packed, view(shares), view(ids)], [view(y)]) == status
        )
        return y


def routing(m: int, how: str) -> tuple[Any, Any]:
    shares = torch.softmax(torch.randn(m, TOPK), -1)
    if how == "one":  # all tokens to the same expert, and each token to it twice
        ids = torch.tensor([[4, 2, 4]]).repeat(m, 1)
    elif how == "skewed":
        ids = torch.stack([torch.cat([torch.tensor([1]), 2 + torch.randperm(3)[:2]]) for _ in range(m)])
    else:
        ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(m)])
    return shares, ids.int()


def test_a_name_tells_its_definition_and_costs_are_expressions() -> None:
    definition = definition_named("moe_e8_k2_h256_i192_bf16")
    assert definition == moe_definition(8, 2, 256, 192, "bfloat16")
    axes = {"M": 3, **{name: axis.value for name, axis in definition.axes.items() if axis.value}}
    assert axes["G"] == 2 * 192
    assert eval(definition.x_polymorph.flops, {}, axes) == 3 * 2 * (2 * 256 * 384 + 2 * 192 * 256)  # noqa: S307
    one_token = 2 * (2 * 256 + 2 * 3 * 192 * 256) + 2 * 8
    assert eval(definition.x_polymorph.bytes, {}, axes | {"M": 1}) == one_token  # noqa: S307
    with pytest.raises(ValueError, match="at most the 2 experts"):
        moe_definition(2, 3, 8, 8, "float32")


def test_the_reference_is_a_sum_over_experts() -> None:
    w13, w2 = weights()
    x, (shares, ids) = torch.randn(4, HIDDEN), routing(4, "any")
    wanted = torch.zeros(4, HIDDEN)
    for token in range(4):
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token]).split(INNER)
            wanted[token] += share * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    run = reference(RAGGED)
    torch.testing.assert_close(run(x, w13, w2, shares, ids), wanted, atol=1e-5, rtol=1e-5)
    assert run(x.double(), w13.double(), w2.double(), shares.double(), ids).dtype is torch.float64
    assert run(x.bfloat16(), w13.bfloat16(), w2.bfloat16(), shares, ids).dtype is torch.bfloat16


def test_variants_are_distinct_and_share_packings(kernels: tuple[Artifact, ...]) -> None:
    assert len(kernels) == len(PATTERNS) >= 4
    assert len({each.digest for each in kernels}) == len(kernels)
    assert len({each.layout for each in kernels}) < len(kernels)


@pytest.mark.parametrize("how", ["any", "skewed", "one"])
def test_every_variant_is_right(kernels: tuple[Artifact, ...], context: int, how: str) -> None:
    w13, w2 = weights()
    packed = [Packed(each.path, context, w13, w2) for each in kernels]
    for m in (1, 2, 7, 33, *([MANY] if how == "any" else [])):
        # Rows of a wider tensor, some zero, some so large that the activation is 0 or the identity.
        x = torch.randn(m, HIDDEN + 3)[:, :HIDDEN] * 10.0 ** torch.randint(-3, 3, (m, 1))
        x[m // 2] = 0
        shares, ids = routing(m, how)
        truth = reference(RAGGED)(x.double(), w13.double(), w2.double(), shares.double(), ids)
        scale = truth.abs().amax(-1, keepdim=True) + 1e-30
        for kernel, artifact in zip(packed, kernels, strict=True):
            off = ((kernel(x, shares, ids) - truth).abs() / scale).max()
            assert off < 2e-6, (artifact.label, m, float(off))


def test_bfloat16_in_and_out(tmp_path: Path, context: int) -> None:
    definition = moe_definition(EXPERTS, TOPK, HIDDEN, INNER, "bfloat16")
    solution = moe_solution(definition, detect_isa(), "stream", PATTERNS["stream"])
    built = build(solution, tmp_path, detect_toolchain(), run_command)
    w13, w2 = weights(torch.bfloat16)
    x, (shares, ids) = torch.randn(9, HIDDEN).bfloat16(), routing(9, "any")
    truth = reference(definition)(x.double(), w13.double(), w2.double(), shares.double(), ids)
    found = Packed(built.path, context, w13, w2)(x, shares, ids)
    off = (found.double() - truth).abs() / truth.abs().clamp_min(1e-2)
    assert off.max() < 2**-8


def test_what_a_kernel_cannot_serve_it_refuses(kernels: tuple[Artifact, ...], context: int) -> None:
    w13, w2 = weights()
    kernel = Packed(kernels[0].path, context, w13, w2)
    x, (shares, ids) = torch.randn(2, HIDDEN), routing(2, "any")
    for wrong in (-1, EXPERTS):
        ids[1, 2] = wrong
        kernel(x, shares, ids, status=3)
    ids[1, 2] = 0
    kernel(x, shares.double(), ids, status=1)
    kernel(x, shares, ids.long(), status=1)
    kernel(x, shares[:, :2].contiguous(), ids[:, :2].contiguous(), status=1)


def test_narrow_storage_takes_bfloat16_values_alone(kernels: tuple[Artifact, ...], context: int) -> None:
    w13, _ = weights()
    w13[3, 7, 11] = 1 + 2**-12
    for artifact, pattern in zip(kernels, PATTERNS.values(), strict=True):
        kernel = Kernel(artifact.path)
        buffer = Buffer(kernel.pack_bytes(view(w13)))
        status = kernel.pack(context, view(w13), buffer.address)
        assert status == (0 if pattern.storage == "float32" else 2), artifact.label
        assert kernel.pack_bytes(view(w13[:, :-1])) == -1


@pytest.mark.parametrize("isa", [Isa.GENERIC, Isa.AVX512])
def test_other_tiers_compile_without_a_warning(tmp_path: Path, isa: Isa) -> None:
    solution = moe_solution(RAGGED, isa, "busiest", PATTERNS["busiest"])
    built = build(solution, tmp_path, detect_toolchain(), run_command)
    assert built.log == ""
    inspect_library(built.content(), packs=True, isa=isa)
